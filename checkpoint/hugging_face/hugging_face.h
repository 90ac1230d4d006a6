#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace lockstep {

/// The dtype of the exported weights.
enum class ExportDtype { fp32, bf16 };

struct ExportOptions {
  ExportDtype dtype = ExportDtype::fp32;
  int64_t max_shard_size = 5'000'000'000;  ///< bytes of tensors a file; a larger one has its own
  /// Write only the low-rank adapters, as adapter_model.safetensors and adapter_config.json of
  /// Hugging Face's peft, not the model. peft reads one file of weights, so max_shard_size does not
  /// apply. FileError: the folder holds the config.json of a model, to whose weights transformers
  /// would add them.
  bool adapters = false;
};

/// Writes the newest checkpoint of `folder` into `out`, so that Hugging Face's transformers can
/// load it: config.json, generation_config.json, the tokenizer's files, and the weights in
/// model.safetensors or, if they do not fit into one file, in model-00001-of-0000N.safetensors, ...
/// and model.safetensors.index.json. They appear together, at the end; an earlier export stays
/// complete until then, and other files in the folder stay. Low-rank adapters are merged into their
/// weights, in fp32. At any moment only one weight and its converted form are in memory. Returns
/// what went wrong besides the export, such as a tokenizer whose files are gone; empty if nothing
/// did. ConfigError names a field of the model that no family of transformers has, or
/// `options.adapters` for a checkpoint without adapters. FileError; also if the folder of a model
/// holds peft's adapters, which transformers would add to its weights.
std::string export_to_hugging_face(const std::string& folder, const std::string& out,
                                   const ExportOptions& options = {});

struct ImportedModel {
  std::string path;  ///< of the checkpoint
  /// Why its tokenizer is not that of `in`, or that it lacks tokens of `in`; empty if neither is so
  /// or `in` has none.
  std::string note;
  std::string problem;  ///< what in `folder` cannot be removed, and why; empty if there is nothing
};

/// Creates a checkpoint of iteration 0 in `folder` from `in`/config.json and `in`/model.safetensors
/// (or the files that `in`/model.safetensors.index.json lists; `in` may also be the path of one of
/// these two, with config.json next to it), weight by weight: in fp32, without optimizer state, for
/// checkpoint.finetune, `evaluate` and `generate`. model.seq_length is the longest sequence in
/// config.json, or `seq_length` if that is less; a table of learned positions is cut to it. The
/// tokenizer's files are copied to `folder`/hugging_face, and data.tokenizer names the first of
/// them that can be used, or `byte` if there is none. FileError names what is missing, damaged or
/// not possible, adapters of peft's that transformers would add to the weights, and a tensor that
/// is not finite in fp32; an earlier import in `folder` is then as it was.
/// A process that is killed while it replaces both may leave the earlier weights with the
/// tokenizer's files of the new import.
ImportedModel import_from_hugging_face(const std::string& in, const std::string& folder,
                                       const std::optional<int64_t>& seq_length = {});

}  // namespace lockstep
