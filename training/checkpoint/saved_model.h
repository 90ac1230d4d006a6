#pragma once

#include <memory>
#include <string>

#include <c10/core/Device.h>

#include "lockstep/core/config.h"
#include "lockstep/models/gpt/gpt_model.h"

namespace lockstep {

/// The weights of a trained model on disk: `folder`/step_N/ with `model.safetensors` (parameter
/// names of GPTModel) and `config.textproto`, and `folder`/latest with the name of the newest step.
///
/// Saves the model as it is after `iteration`. The step's folder appears complete or not at all; an
/// earlier one of the same name is replaced. Returns its path. FileError names what failed.
std::string save_model(const std::string& folder, int64_t iteration, const Config& config,
                       const GPTModel& model);

struct SavedModel {
  Config config;
  std::shared_ptr<GPTModel> model;
  std::string path;  ///< of the step's folder
};

/// Loads the newest step of `folder`, or `folder` itself if it is the folder of a step, in fp32.
/// FileError: no complete step, a file that is missing or damaged, a tensor that is missing, left
/// over or of another shape.
SavedModel load_model(const std::string& folder, c10::Device device);

}  // namespace lockstep
