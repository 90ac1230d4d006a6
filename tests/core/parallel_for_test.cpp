#include "lockstep/core/parallel_for.h"

#include <gtest/gtest.h>

#include <mutex>
#include <set>
#include <stdexcept>
#include <thread>
#include <vector>

#include <ATen/Parallel.h>

namespace lockstep {
namespace {

/// Sets the number of threads during its lifetime.
class Threads {
 public:
  explicit Threads(int count) : before_(at::get_num_threads()) { at::set_num_threads(count); }
  ~Threads() { at::set_num_threads(before_); }
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;

 private:
  int before_;
};

std::set<std::thread::id> threads_of(int64_t count, int64_t grain) {
  std::mutex mutex;
  std::set<std::thread::id> threads;
  parallel_for(0, count, grain, [&](int64_t, int64_t) {
    const std::lock_guard<std::mutex> lock(mutex);
    threads.insert(std::this_thread::get_id());
  });
  return threads;
}

#if defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_THREAD__)
TEST(ParallelFor, TakesAsManyThreadsAsLibtorchWasTold) {
  const Threads three(3);
  EXPECT_EQ(threads_of(3000, 1000).size(), 3U);
  EXPECT_EQ(threads_of(2000, 1000).size(), 2U);
  EXPECT_EQ(threads_of(1000, 1000).size(), 1U);
}
#endif

TEST(ParallelFor, TakesOneThreadWhereLibtorchMay) {
  const Threads one(1);
  EXPECT_EQ(threads_of(3000, 10), std::set<std::thread::id>{std::this_thread::get_id()});
}

TEST(ParallelFor, VisitsEachNumberOnce) {
  const Threads three(3);
  std::vector<int> visits(1001);
  parallel_for(0, 1001, 7, [&](int64_t first, int64_t end) {
    for (int64_t i = first; i < end; ++i) ++visits[static_cast<size_t>(i)];
  });
  EXPECT_EQ(visits, std::vector<int>(1001, 1));
  parallel_for(5, 5, 1, [&](int64_t, int64_t) { ADD_FAILURE(); });
}

TEST(ParallelFor, ThrowsAgainWhatAThreadHasThrown) {
  const Threads two(2);
  const auto throws = [](int64_t, int64_t end) {
    if (end > 50) throw std::runtime_error("the second part");
  };
  EXPECT_THROW(parallel_for(0, 100, 50, throws), std::runtime_error);
}

}  // namespace
}  // namespace lockstep
