#include "lockstep/checkpoint/weights_writer.h"

#include <filesystem>

#include "lockstep/checkpoint/checkpoint_reader.h"
#include "lockstep/checkpoint/safetensors_header.h"
#include "lockstep/checkpoint/step_folders.h"
#include "lockstep/core/check.h"
#include "lockstep/core/config_io.h"

namespace lockstep {

WeightsWriter::WeightsWriter(const std::string& folder, const Config& config,
                             const std::vector<NewWeight>& weights)
    : lock_(folder), checkpoint_(folder, 0) {
  problem_ = checkpoint_.begin();
  try {
    begin_files(config, weights);
  } catch (...) {  // the destructor will not run
    discard();
    throw;
  }
}

void WeightsWriter::begin_files(const Config& config, const std::vector<NewWeight>& weights) {
  const std::string inside = std::filesystem::path(checkpoint_.file("")).parent_path();
  manifest_.files.push_back(write_text_file(inside, kConfigName, print_config(config)));
  SafetensorsHeader header{.entries = {}, .metadata = {{"format", "pt"}}};
  for (const NewWeight& weight : weights) {
    const TensorBox box = whole_box(weight.shape);
    const int64_t begin = header.entries.empty() ? 0 : header.entries.back().end;
    const int64_t end = begin + box.numel() * safetensors_element_size(weight.dtype);
    header.entries.push_back({weight.name, weight.dtype, weight.shape, begin, end});
    manifest_.tensors.push_back({weight.name,
                                 "",
                                 weight.dtype,
                                 weight.shape,
                                 {{.file = 1, .offset = begin, .part = {box, {0, box.numel()}}}}});
  }
  const std::string text = format_safetensors_header(header);
  for (ManifestTensor& tensor : manifest_.tensors)
    tensor.pieces.front().offset += static_cast<int64_t>(text.size());
  bytes_ = header.entries.empty() ? 0 : header.entries.back().end;
  shard_.emplace(inside, "rank_00000.safetensors");
  shard_->write(text);
}

WeightsWriter::~WeightsWriter() {
  if (!complete_) discard();
}

void WeightsWriter::discard() noexcept {
  shard_.reset();  // NFS keeps a file that is open
  checkpoint_.discard();
}

void WeightsWriter::write(std::string_view bytes) {
  shard_->write(bytes);
  written_ += static_cast<int64_t>(bytes.size());
}

std::string WeightsWriter::commit(const std::function<void()>& before) {
  require<UsageError>(written_ == bytes_, "'{}': found {} bytes of weights, allowed: {}",
                      checkpoint_.path(), written_, bytes_);
  manifest_.files.push_back(shard_->finish());
  const std::string text = format_manifest(manifest_);
  parse_manifest(text, checkpoint_.file(kManifestName));
  if (before) before();
  problem_ = join_problems({problem_, checkpoint_.commit(text)});
  complete_ = true;
  return checkpoint_.path();
}

}  // namespace lockstep
