#include <gtest/gtest.h>

#include <chrono>
#include <future>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "lockstep/parallel_state/backends.h"

namespace lockstep {
namespace {

/// The store of a rank that leaves as soon as it has told its address.
class LeavingStore : public c10d::PrefixStore {
 public:
  explicit LeavingStore(const c10::intrusive_ptr<c10d::Store>& store) : PrefixStore("", store) {}
  std::vector<uint8_t> get(const std::string& /*key*/) override { leave(); }
  void wait(const std::vector<std::string>& /*keys*/) override { leave(); }
  void wait(const std::vector<std::string>& /*keys*/,
            const std::chrono::milliseconds& /*timeout*/) override {
    leave();
  }

 private:
  [[noreturn]] static void leave() { throw std::runtime_error("left"); }
};

BackendSpec spec_of(int rank, c10::intrusive_ptr<c10d::Store> store) {
  BackendSpec spec;
  spec.store = std::move(store);
  spec.group_name = "pair";
  spec.ranks = {0, 1};
  spec.rank = rank;
  spec.timeout = std::chrono::seconds(2);
  return spec;
}

/// Which side of a pair waits and which one is refused depends on the addresses.
TEST(BackendGloo, ConnectingToARankThatHasLeftEndsWithinTheTimeout) {
  for (const int leaver : {0, 1, 0, 1}) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    store->setTimeout(std::chrono::seconds(2));
    const auto leaving = c10::make_intrusive<c10d::PrefixStore>(
        "", c10::intrusive_ptr<c10d::Store>(c10::make_intrusive<LeavingStore>(store)));
    auto left = std::async(std::launch::async,
                           [&] { EXPECT_ANY_THROW(make_gloo_backend(spec_of(leaver, leaving))); });
    left.wait();
    const auto both = c10::make_intrusive<c10d::PrefixStore>(
        "", c10::intrusive_ptr<c10d::Store>(c10::make_intrusive<c10d::PrefixStore>("", store)));
    const auto start = std::chrono::steady_clock::now();
    EXPECT_ANY_THROW(make_gloo_backend(spec_of(1 - leaver, both)));
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
  }
}

TEST(BackendGloo, HasTheWholeTimeoutOnceItIsConnected) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  auto other = std::async(std::launch::async, [&] { return make_gloo_backend(spec_of(1, store)); });
  const auto mine = make_gloo_backend(spec_of(0, store));
  for (const auto& backend : {mine, other.get()})
    EXPECT_EQ(backend->getBackendOptions()->timeout, std::chrono::seconds(2));
}

}  // namespace
}  // namespace lockstep
