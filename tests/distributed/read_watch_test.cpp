#include "lockstep/distributed/read_watch.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include <ATen/ATen.h>
#include <ATen/ThreadLocalState.h>

namespace lockstep {
namespace {

/// Counts how often `tensor` is read.
class Reads final : public ReadObserver {
 public:
  explicit Reads(const at::Tensor& tensor) : tensor_(tensor) {}

  bool on_read(const at::Tensor& tensor) noexcept override {
    if (tensor.is_same(tensor_)) ++count_;
    return false;
  }
  int64_t take() { return count_.exchange(0); }

 private:
  const at::Tensor tensor_;
  std::atomic<int64_t> count_ = 0;
};

TEST(ReadWatch, SeesEveryReadOfAThreadOfBackwardWhileItsOwnCallsOperatorsToo) {
  constexpr int64_t kCalls = 20'000;
  const at::Tensor read = at::zeros({1}), other = at::zeros({1});
  Reads reads(read);
  ReadWatch watch;
  watch.start(reads);
  read.neg();
  const int64_t of_a_call = reads.take();
  EXPECT_GE(of_a_call, 1);
  std::atomic<bool> done = false;
  // As autograd hands the state over to a device's thread.
  std::thread device([&, state = at::ThreadLocalState()] {
    const at::ThreadLocalStateGuard guard(state);
    for (int64_t i = 0; i < kCalls; ++i) read.neg();
    done = true;
  });
  while (!done) other.neg();
  device.join();
  EXPECT_EQ(reads.take(), kCalls * of_a_call);
}

TEST(ReadWatch, IsNotOnAThreadThatGotTheIdOfOneThatHasEnded) {
  const at::Tensor read = at::zeros({1});
  Reads reads(read);
  ReadWatch watch;
  EXPECT_FALSE(watch.is_on_this_thread());
  std::thread([&] {
    watch.start(reads);
    EXPECT_TRUE(watch.is_on_this_thread());
    read.neg();
    EXPECT_GE(reads.take(), 1);
  }).join();
  std::thread([&] {
    EXPECT_FALSE(watch.is_on_this_thread());
    read.neg();
    EXPECT_EQ(reads.take(), 0);
    watch.start(reads);
    EXPECT_TRUE(watch.is_on_this_thread());
    read.neg();
    EXPECT_GE(reads.take(), 1);
    watch.stop();
    EXPECT_FALSE(watch.is_on_this_thread());
  }).join();
}

}  // namespace
}  // namespace lockstep
