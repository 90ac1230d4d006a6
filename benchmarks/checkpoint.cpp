// Saves and loads 1 GiB of state, one command per line of standard input; checkpoint.py runs it and
// PyTorch in turn. Answers are seconds.
//
//   save FOLDER             saves, and waits until it is on disk
//   async FOLDER SECONDS    saves during a loop whose steps compute for SECONDS before they change
//                           the state. Answers: seconds for which the loop was held up, seconds
//                           until the checkpoint was complete
//   load FOLDER             loads into existing memory
//   tensors                 number and shape of the tensors (fp32), for the other side

#include <chrono>
#include <cstdio>
#include <iostream>
#include <sstream>
#include <thread>

#include <ATen/ATen.h>

#include "lockstep/benchmarks/interleaved.h"
#include "lockstep/checkpoint/checkpoint_saver.h"

namespace lockstep::benchmarks {
namespace {

constexpr int64_t kTensors = 64, kRows = 1024, kColumns = 4096;  // 16 MiB each

std::vector<StateTensor> make_state() {
  std::vector<StateTensor> state;
  for (int64_t i = 0; i < kTensors; ++i) {
    const at::Tensor values = at::arange(kRows * kColumns, at::kFloat).mul_(0.5).add_(i);
    state.push_back({"tensor" + std::to_string(i),
                     "",
                     {whole_box({kRows, kColumns}), {0, kRows * kColumns}},
                     values});
  }
  return state;
}

class Bench {
 public:
  Bench() : world_(ParallelState::single_process()), state_(make_state()) {}

  void answer(const std::string& line) {
    std::istringstream words(line);
    std::string command, folder;
    double step = 0;
    words >> command >> folder >> step;
    if (command == "save") {
      std::printf("%.6f\n", seconds_of([&] { save(folder); }));
    } else if (command == "async") {
      save_beside_a_loop(folder, step);
    } else if (command == "load") {
      std::printf("%.6f\n", seconds_of([&] {
                    CheckpointReader checkpoint(folder);
                    load_state(checkpoint, state_);
                  }));
    } else {
      std::printf("%d %d %d\n", static_cast<int>(kTensors), static_cast<int>(kRows),
                  static_cast<int>(kColumns));
    }
    std::fflush(stdout);
  }

 private:
  void save(const std::string& folder) {
    CheckpointSaver(world_, {.folder = folder}).save(state_, {}, Config{});
  }

  void save_beside_a_loop(const std::string& folder, double step) {
    if (!saver_ || folder != folder_)
      saver_ = std::make_unique<CheckpointSaver>(
          world_,
          CheckpointSaverOptions{.folder = folder, .async = true, .copy_in_background = true});
    folder_ = folder;
    double held_up = 0;
    const double whole = seconds_of([&] {
      held_up += seconds_of([&] { saver_->save(state_, {}, Config{}); });
      std::this_thread::sleep_for(std::chrono::duration<double>(step));
      held_up += seconds_of([&] { saver_->finish_copy(); });
      saver_->finish();
    });
    std::printf("%.6f %.6f\n", held_up, whole);
  }

  ParallelState world_;
  std::vector<StateTensor> state_;
  std::string folder_;
  std::unique_ptr<CheckpointSaver> saver_;
};

}  // namespace
}  // namespace lockstep::benchmarks

int main() {
  lockstep::benchmarks::Bench bench;
  for (std::string line; std::getline(std::cin, line);) bench.answer(line);
}
