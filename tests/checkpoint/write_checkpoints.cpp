// The program that tests/end_to_end/save_faults_test.py runs a thousand times; without libtorch.
//
// write_checkpoints FOLDER KEEP ITERATION:SAMPLES[:SKIPPED]... saves small checkpoints one after
// another, as a run does. SAMPLES (the consumed samples) distinguishes two saves of an iteration.
//
// write_checkpoints export FOLDER WEIGHTS CONFIG writes two files with these texts, as an export of
// a model does.

#include <array>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>

#include "lockstep/checkpoint/checkpoint_folder.h"
#include "lockstep/checkpoint/checkpoint_reader.h"
#include "lockstep/checkpoint/export_folder.h"
#include "lockstep/checkpoint/folder_lock.h"
#include "lockstep/checkpoint/shard_file.h"

using namespace lockstep;

namespace {

constexpr int64_t kNumbers = 1000;

struct Save {
  int64_t iteration = 0, samples = 0, skipped = 0;
};

std::string save(const std::string& folder, int64_t keep, const Save& what) {
  const PartialCheckpoint checkpoint(folder, what.iteration);
  const std::string left = checkpoint.begin();
  if (!left.empty()) std::fprintf(stderr, "%s\n", left.c_str());
  const std::string inside = checkpoint.file("");
  Manifest manifest;
  manifest.iteration = what.iteration;
  manifest.consumed_samples = what.samples;
  manifest.skipped_steps = what.skipped;
  manifest.files.push_back(write_text_file(inside, kConfigName, "model { num_layers: 1 }\n"));
  std::array<int64_t, kNumbers> numbers = {};
  numbers.fill(what.samples);
  const TensorPart part{whole_box({kNumbers}), {0, kNumbers}};
  const WrittenShard shard =
      write_shard(inside, "rank_00000.safetensors",
                  {{"w", "", "I64", part, numbers.data(), int64_t{sizeof numbers}}});
  manifest.files.push_back(shard.file);
  manifest.tensors.push_back({"w", "", "I64", {kNumbers}, {{1, shard.offsets[0], part}}});
  return checkpoint.commit(format_manifest(manifest), {keep, what.skipped});
}

}  // namespace

int main(int argc, char** argv) {
  try {
    if (argc == 5 && std::string(argv[1]) == "export") {
      ExportFolder files(argv[2], {"model.safetensors", "config.json"}, "--hf");
      write_file(files.file("model.safetensors"), {argv[3]});
      write_file(files.file("config.json"), {argv[4]});
      const std::string left = files.publish();
      if (!left.empty()) std::fprintf(stderr, "%s\n", left.c_str());
      return 0;
    }
    const std::string folder = argv[1];
    const FolderLock lock(folder);
    for (int i = 3; i < argc; ++i) {
      Save what;
      std::sscanf(argv[i], "%ld:%ld:%ld", &what.iteration, &what.samples, &what.skipped);
      const std::string problem = save(folder, std::atoll(argv[2]), what);
      if (!problem.empty()) std::fprintf(stderr, "%s\n", problem.c_str());
    }
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
