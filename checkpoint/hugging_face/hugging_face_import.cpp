#include <algorithm>
#include <filesystem>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <numeric>
#include <set>

#include <ATen/ATen.h>

#include "lockstep/checkpoint/companion_files.h"
#include "lockstep/checkpoint/finite_values.h"
#include "lockstep/checkpoint/hugging_face.h"
#include "lockstep/checkpoint/hugging_face_config.h"
#include "lockstep/checkpoint/hugging_face_weights.h"
#include "lockstep/checkpoint/peft_adapters.h"
#include "lockstep/checkpoint/safetensors.h"
#include "lockstep/checkpoint/safetensors_index.h"
#include "lockstep/checkpoint/sharded_safetensors.h"
#include "lockstep/checkpoint/step_folders.h"
#include "lockstep/checkpoint/training_state.h"
#include "lockstep/checkpoint/weights_writer.h"
#include "lockstep/checkpoint/whole_model.h"
#include "lockstep/core/check.h"
#include "lockstep/core/config_io.h"
#include "lockstep/core/input_file.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kLongestJson = int64_t{64} << 20;

/// In the folder where transformers keeps downloaded models, every file is a link.
std::string read_json(const std::string& path) {
  return read_file(path, kLongestJson, /*follow_links=*/true);
}

/// A folder of Hugging Face's, and its file of weights or their index.
struct ModelFolder {
  std::string folder;
  std::string weights;
};

bool is_index(const std::string& name) { return name.ends_with(".safetensors.index.json"); }

/// `in` is the folder, or its file of weights or their index.
ModelFolder model_folder(const std::string& in) {
  const fs::path path = in;
  if (kind_of_file(in) != FileKind::regular) {
    const auto is_there = [&](const char* name) {
      return kind_of_file(path / name) != FileKind::none;
    };
    const bool indexed = is_there(kWeightsIndexFile) && !is_there(kWeightsFile);
    return {in, indexed ? kWeightsIndexFile : kWeightsFile};
  }
  const std::string name = path.filename();
  require<FileError>(is_index(name) || name.ends_with(".safetensors"),
                     "'{}': found a different file, allowed: a folder, {} or {}", in, kWeightsFile,
                     kWeightsIndexFile);
  return {path.has_parent_path() ? path.parent_path().string() : ".", name};
}

/// The tensors of a file, or of the files of an index; the headers are in memory.
class SafetensorsFolder {
 public:
  explicit SafetensorsFolder(const ModelFolder& in) : path_(in.folder) {
    is_index(in.weights) ? open_indexed(in.weights) : open(in.weights);
  }

  std::vector<std::string> names() const {
    std::vector<std::string> names;
    for (const auto& [name, place] : tensors_) names.push_back(name);
    return names;
  }
  /// A meta tensor, without values.
  at::Tensor shape_of(const std::string& name) const {
    const SafetensorsEntry& entry = *tensors_.at(name).entry;
    return at::empty(entry.shape,
                     at::TensorOptions(dtype_of_safetensors(entry.dtype)).device(at::kMeta));
  }
  at::Tensor read(const std::string& name) const {
    const Place& place = tensors_.at(name);
    at::Tensor tensor = place.file->read(*place.entry);
    const bool may_overflow = tensor.scalar_type() == at::kDouble;
    if (may_overflow) tensor = tensor.to(at::kFloat);
    const int64_t count = count_not_finite(tensor);
    require<FileError>(count == 0, "'{}': {}{}", place.file->path(),
                       describe_not_finite(name, count, tensor.numel()),
                       may_overflow ? " after the conversion to fp32" : "");
    return tensor;
  }

 private:
  struct Place {
    const SafetensorsFile* file;
    const SafetensorsEntry* entry;
  };

  void open(const std::string& name) {
    const auto& file = files_.emplace_back(std::make_unique<SafetensorsFile>(path_ / name));
    for (const SafetensorsEntry& entry : file->header().entries)
      require<FileError>(tensors_.try_emplace(entry.name, Place{file.get(), &entry}).second,
                         "'{}': tensor '{}' is in another file too", file->path(), entry.name);
  }

  void open_indexed(const std::string& name) {
    const std::string index = path_ / name;
    const WeightMap weights = parse_safetensors_index(read_json(index), index);
    std::set<std::string> names;
    for (const auto& [tensor, file] : weights) names.insert(file);
    for (const std::string& file : names) open(file);
    for (const auto& [tensor, file] : weights) {
      const auto found = tensors_.find(tensor);
      const std::string path = path_ / file;
      require<FileError>(found != tensors_.end() && found->second.file->path() == path,
                         "'{}': tensor '{}' is missing, but '{}' lists it", path, tensor, index);
    }
  }

  fs::path path_;
  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  std::map<std::string, Place> tensors_;
};

/// The tensors of a folder: only their shapes, or also their values.
class FolderTensors : public TensorSource {
 public:
  FolderTensors(const SafetensorsFolder& folder, bool meta) : folder_(folder), meta_(meta) {}
  std::vector<std::string> names() const override { return folder_.names(); }
  at::Tensor read(const std::string& name) const override {
    return meta_ ? folder_.shape_of(name) : folder_.read(name);
  }

 private:
  const SafetensorsFolder& folder_;
  bool meta_;
};

/// The shapes of the parameters, by name. A gate and its inner matrix are stacked as rows here, and
/// so are experts.
std::map<std::string, std::vector<int64_t>> shapes_in_files(const Config& config) {
  std::map<std::string, std::vector<int64_t>> shapes;
  for (const WholeParameter& param : whole_parameters(config)) {
    const std::vector<int64_t>& shape = param.shape;
    const bool stacked = shape.size() > 2;
    const int64_t rows =
        std::accumulate(shape.begin(), std::prev(shape.end()), int64_t{1}, std::multiplies<>());
    shapes[param.name] = stacked ? std::vector<int64_t>{rows, shape.back()} : shape;
  }
  return shapes;
}

/// The weights of the import, in the order in which they will come. `longest` is the configuration
/// with the sequence length of the config.json. FileError: one is missing or has another shape.
std::vector<NewWeight> expected_weights(const Config& config, const Config& longest,
                                        const SafetensorsFolder& tensors, const std::string& path) {
  std::vector<std::pair<std::string, std::vector<int64_t>>> found;
  from_hugging_face(longest.model, FolderTensors(tensors, /*meta=*/true), path,
                    [&](const std::string& name, const at::Tensor& tensor) {
                      found.emplace_back(name, tensor.sizes().vec());
                    });
  const auto allowed = shapes_in_files(longest);
  std::map<std::string, std::vector<int64_t>> parameters;
  for (const WholeParameter& param : whole_parameters(config)) parameters[param.name] = param.shape;
  std::vector<NewWeight> weights;
  for (const auto& [name, shape] : found) {
    const auto parameter = parameters.extract(name);
    require<UsageError>(!parameter.empty(), "import: weight '{}' has no parameter", name);
    require<FileError>(shape == allowed.at(name),
                       "'{}': weight '{}': found shape [{}], allowed: [{}]", path, name,
                       fmt::join(shape, ", "), fmt::join(allowed.at(name), ", "));
    weights.push_back({name, "F32", parameter.mapped()});
  }
  require<UsageError>(parameters.empty(), "import: weight '{}' is missing",
                      parameters.empty() ? "" : parameters.begin()->first);
  return weights;
}

/// The weights do not determine the length of the tables of rotary angles. FileError if there is no
/// memory for one.
void check_positions(const TransformerConfig& model, const std::string& path) {
  if (model.position_embedding_type != PositionEmbeddingType::rope) return;
  try {
    at::empty({model.seq_length, *model.kv_channels}, at::kDouble);
  } catch (const c10::Error& error) {
    fail<FileError>("'{}': a model of {} positions cannot be made: {}", path, model.seq_length,
                    error.what_without_backtrace());
  }
}

/// Removes the folder again if it is new, unless keep() was called.
class NewFolder {
 public:
  explicit NewFolder(const std::string& path)
      : path_(path), is_new_(kind_of_file(path) == FileKind::none) {}
  ~NewFolder() {
    std::error_code ignored;
    if (is_new_) fs::remove_all(path_, ignored);
  }
  NewFolder(const NewFolder&) = delete;
  NewFolder& operator=(const NewFolder&) = delete;
  void keep() { is_new_ = false; }

 private:
  std::string path_;
  bool is_new_;
};

/// The part of `tensor` that the model has, in fp32: a table of positions may be cut.
at::Tensor imported_values(const at::Tensor& tensor, const NewWeight& weight) {
  const bool cut = tensor.dim() == static_cast<int64_t>(weight.shape.size()) &&
                   tensor.size(0) > weight.shape.front();
  return (cut ? tensor.narrow(0, 0, weight.shape.front()) : tensor).to(at::kFloat).contiguous();
}

}  // namespace

ImportedModel import_from_hugging_face(const std::string& in, const std::string& folder,
                                       const std::optional<int64_t>& seq_length) {
  const at::NoGradGuard no_grad;
  const ModelFolder from = model_folder(in);
  check_without_adapters(from.folder, "; peft's merge_and_unload() merges them");
  const std::string path = fs::path(from.folder) / kConfigFile;
  Config longest;
  longest.model = parse_hugging_face_config(read_json(path), path);
  longest = resolve(longest);
  Config config;  // without the values that resolve() would derive from the defaults of a run
  config.model = longest.model;
  if (seq_length) config.model.seq_length = std::min(config.model.seq_length, *seq_length);
  check_positions(config.model, path);
  const SafetensorsFolder tensors{from};
  const std::string file = fs::path(from.folder) / from.weights;
  const std::vector<NewWeight> weights = expected_weights(config, longest, tensors, file);
  const bool is_gpt2 = hugging_face_family(config.model) == HuggingFaceFamily::gpt2;
  const KeptTokenizer tokenizer = choose_tokenizer(from.folder, folder, is_gpt2);
  config.data.tokenizer = tokenizer.name;
  NewFolder made(folder);
  WeightsWriter writer(folder, config, weights);
  const std::string copies = writer.temporary("companions");
  copy_companions(from.folder, copies, read_json(path));
  KeptCompanions companions(copies, folder);
  auto next = weights.begin();
  from_hugging_face(longest.model, FolderTensors(tensors, /*meta=*/false), file,
                    [&](const std::string& /*name*/, const at::Tensor& tensor) {
                      writer.write(bytes_of(imported_values(tensor, *next++)));
                    });
  const std::string checkpoint = writer.commit([&] { companions.put_in_place(); });
  const std::string left = companions.keep();
  made.keep();
  return {checkpoint, tokenizer.note, join_problems({writer.problem(), left})};
}

}  // namespace lockstep
