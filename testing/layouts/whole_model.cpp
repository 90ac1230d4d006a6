#include "lockstep/testing/whole_model.h"

#include <mutex>

#include <ATen/CPUGeneratorImpl.h>

namespace lockstep::testing {
namespace {

class SeededGenerator {
 public:
  explicit SeededGenerator(uint64_t seed) : generator_(at::detail::getDefaultCPUGenerator()) {
    const std::lock_guard<std::mutex> lock(generator_.mutex());
    state_ = generator_.get_state();
    generator_.set_current_seed(seed);
  }
  SeededGenerator(const SeededGenerator&) = delete;
  SeededGenerator& operator=(const SeededGenerator&) = delete;
  ~SeededGenerator() {
    const std::lock_guard<std::mutex> lock(generator_.mutex());
    generator_.set_state(state_);
  }

 private:
  at::Generator generator_;
  at::Tensor state_;
};

}  // namespace

std::shared_ptr<torch::nn::Module> make_whole_model(const MakeModule& make,
                                                    const ParallelContext& context) {
  const SeededGenerator seeded(context.seed);
  return make(context);
}

}  // namespace lockstep::testing
