// Reads files as a run does, for read_faults_test.py: `read_files KIND PATH [ITERATION]` prints a
// checksum of what it read. text: a text of data.path; samples: those of a data set, whose index is
// cached next to it; metrics: a folder's metrics.jsonl, resumed after ITERATION; checkpoint: every
// tensor and the configuration; lock: a folder's.

#include <cstdio>
#include <cstdlib>

#include "lockstep/checkpoint/checkpoint_reader.h"
#include "lockstep/checkpoint/folder_lock.h"
#include "lockstep/checkpoint/safetensors_header.h"
#include "lockstep/datasets/crc32.h"
#include "lockstep/datasets/sample_source.h"
#include "lockstep/datasets/text_dataset.h"
#include "lockstep/training/metrics.h"

namespace lockstep {
namespace {

uint32_t checksum(const std::vector<int64_t>& ids, uint32_t before) {
  return crc32({reinterpret_cast<const char*>(ids.data()), ids.size() * sizeof ids[0]}, before);
}

uint32_t read_whole_text(const std::string& path) {
  DataConfig config;
  config.path = {path};
  config.split = "1,0";
  const TokenSequence text = read_text(config).training;
  std::vector<int64_t> ids(static_cast<size_t>(text.size()));
  text.read(0, ids);
  return checksum(ids, 0);
}

uint32_t read_samples(const std::string& prefix) {
  DataConfig config;
  config.path = {prefix};
  config.split = "1,0";
  std::vector<int64_t> ids(17);
  const SampleSources sources = open_samples(config, int64_t{1} << 30, 16, 1);
  uint32_t sum = 0;
  for (int64_t sample = 0; sample < 10; ++sample) {
    sources.training->read(sample, ids);
    sum = checksum(ids, sum);
  }
  return sum;
}

uint32_t read_checkpoint(const std::string& folder) {
  CheckpointReader checkpoint(folder);
  uint32_t sum = static_cast<uint32_t>(checkpoint.manifest().iteration);
  for (const ManifestTensor& tensor : checkpoint.manifest().tensors) {
    const TensorPart whole{whole_box(tensor.shape), {0, tensor.numel()}};
    std::string bytes(static_cast<size_t>(tensor.numel() * safetensors_element_size(tensor.dtype)),
                      '\0');
    checkpoint.read(tensor, whole, bytes.data());
    sum = crc32(bytes, sum);
  }
  return sum + static_cast<uint32_t>(checkpoint.config().model.num_layers);
}

uint32_t read_kind(const std::string& kind, const std::string& path, int64_t iteration) {
  if (kind == "text") return read_whole_text(path);
  if (kind == "samples") return read_samples(path);
  if (kind == "checkpoint") return read_checkpoint(path);
  if (kind == "metrics") MetricsFile(path, {.iteration = iteration}).write("next");
  if (kind == "lock") const FolderLock lock(path);
  return 0;
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  if (argc < 3) return 2;
  try {
    std::printf("%08x\n",
                lockstep::read_kind(argv[1], argv[2], argc > 3 ? std::atoll(argv[3]) : 0));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
