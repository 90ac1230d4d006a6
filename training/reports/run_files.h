#pragma once

#include <string>

#include "lockstep/core/config.h"

namespace lockstep {

/// The files that a run leaves in its folder, besides its checkpoints.
struct RunFiles {
  std::string metrics;   ///< metrics.jsonl
  std::string config;    ///< config.textproto: the effective configuration of the last start
  std::string loss_svg;  ///< loss.svg: written when the run ends
  std::string traces;    ///< traces: the folder of `--profile`
  std::string audit;     ///< audit.json: what `--audit` measured
};

RunFiles run_files(const std::string& folder);

/// "tensor 2, pipeline 4": the sizes that the run chose; empty if all are 1.
std::string layout_text(const ParallelConfig& parallel);

/// Whether the file `path` exists and was written after `other`, or at the same time.
bool is_newer(const std::string& path, const std::string& other);

/// Seconds since a file was last written; 0 if that is not known.
double seconds_since_change(const std::string& path);

}  // namespace lockstep
