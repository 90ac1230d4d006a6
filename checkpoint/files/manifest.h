#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/checkpoint/tensor_box.h"
#include "lockstep/parallel_state/rank_grids.h"

/// The manifest of a checkpoint: what each file of its folder holds. On disk it is
/// `manifest.textproto`, whose schema is manifest.proto. Needs no libtorch.
namespace lockstep {

/// Files are checked in blocks of this many bytes, so that a rank can trust what it reads without
/// reading the rest.
inline constexpr int64_t kChecksumBlock = int64_t{1} << 20;

inline constexpr const char* kManifestName = "manifest.textproto";

/// The layout of the ranks of the run that saved, except for the levels of context.
struct ManifestLayout : ParallelSizes {
  bool distributed_optimizer = false;
  /// Equal in everything that a manifest says about them.
  bool operator==(const ManifestLayout& other) const;
};

/// State of the loss scaler.
struct ManifestScaler {
  double scale = 1;
  int64_t growth_tracker = 0;
  int64_t hysteresis_tracker = 0;
  bool operator==(const ManifestScaler&) const = default;
};

/// What a run with train.on_spike knows about previous iterations.
struct ManifestSpikes {
  std::vector<double> losses, grad_norms;  ///< of the last iterations with an update, oldest first
  int64_t left_out_samples = 0;            ///< by going back: in addition to consumed_samples
  /// The iteration that the run last went back to. Only in copies in memory: a run that resumes
  /// from a checkpoint on disk finds the spike again.
  std::optional<int64_t> came_from = {};
  bool operator==(const ManifestSpikes&) const = default;
};

struct ManifestFile {
  std::string name;                   ///< in the folder
  int64_t size = 0;                   ///< bytes
  std::vector<uint32_t> block_crc32;  ///< of each block of kChecksumBlock bytes
  bool operator==(const ManifestFile&) const = default;
};

/// A part of a tensor in a file.
struct ManifestPiece {
  int64_t file = 0;    ///< index among the files
  int64_t offset = 0;  ///< bytes from the start of the file
  TensorPart part;
  bool operator==(const ManifestPiece&) const = default;
};

struct ManifestTensor {
  std::string name;   ///< global name of the parameter
  std::string state;  ///< empty for its value, otherwise a part of the optimizer's state: "exp_avg"
  std::string dtype;  ///< as safetensors calls it
  std::vector<int64_t> shape;
  std::vector<ManifestPiece> pieces;
  bool operator==(const ManifestTensor&) const = default;

  /// Name in safetensors files: `name`, or "optimizer.exp_avg.name".
  std::string key() const;
  int64_t numel() const;
};

struct Manifest {
  int64_t iteration = 0;
  int64_t consumed_samples = 0;
  int64_t optimizer_steps = 0;
  int64_t skipped_steps = 0;    ///< in a row, up to this iteration
  int64_t skipped_samples = 0;  ///< of consumed_samples, in all skipped steps
  /// The checksum of the iteration's line in metrics.jsonl, by which a resumed run recognizes its
  /// lines.
  std::optional<uint32_t> metrics_checksum;
  std::optional<ManifestScaler> scaler;
  ManifestSpikes spikes;
  std::string job_id;  ///< of the launcher, as in JobStart::job_id; empty: not known
  ManifestLayout layout;
  std::vector<ManifestFile> files;
  std::vector<ManifestTensor> tensors;
  bool operator==(const Manifest&) const = default;

  /// nullptr if it does not exist.
  const ManifestTensor* find(std::string_view name, std::string_view state) const;
};

/// ManifestTensor::key(), given its two parts.
std::string tensor_key(std::string_view name, std::string_view state);

/// The text of a manifest, including the checksum.
std::string format_manifest(const Manifest& manifest);

/// Parses such a text. FileError with `path` and the place: a wrong checksum, a syntax error, an
/// unknown field, a newer format; a file name that leaves the folder, a file or tensor that occurs
/// twice; a number out of bounds; a tensor with elements that are missing, duplicated, or outside
/// its file.
Manifest parse_manifest(std::string_view text, const std::string& path);

/// parse_manifest() without checking the checksum, which must still be there. For fuzzing.
Manifest parse_manifest_body(std::string_view text, const std::string& path);

/// parse_manifest() for what one rank has written, which need not hold every element.
Manifest parse_manifest_part(std::string_view text, const std::string& path);

/// Joins what the ranks have written; everything else is taken from `whole`. UsageError if two of
/// them have different shapes or dtypes for the same tensor.
Manifest join_manifests(Manifest whole, const std::vector<Manifest>& parts);

}  // namespace lockstep
