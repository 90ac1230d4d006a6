#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <barrier>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <future>
#include <iterator>
#include <set>
#include <sstream>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "lockstep/parallel_state/backends.h"
#include "lockstep/parallel_state/network.h"

namespace lockstep {
namespace {

/// The store of a rank that leaves as soon as it has published its address.
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

/// It depends on the addresses which side of a pair waits and which one is refused.
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

/// The loopback ports on which this process listens.
std::vector<int> listening_ports() {
  std::set<std::string> own;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    own.insert(std::filesystem::read_symlink(entry, gone).string());
  }
  std::ifstream table("/proc/self/net/tcp");
  std::vector<int> ports;
  for (std::string line; std::getline(table, line);) {
    std::istringstream fields(line);
    std::vector<std::string> words(std::istream_iterator<std::string>(fields), {});
    if (words.size() > 9 && words[3] == "0A" && own.contains("socket:[" + words[9] + "]"))
      ports.push_back(std::stoi(words[1].substr(words[1].find(':') + 1), nullptr, 16));
  }
  return ports;
}

/// Connects to all ports on which this process listens, and sends small numbers first.
std::vector<int> visit_ports() {
  std::vector<int> sockets;
  for (const int port : listening_ports())
    for (uint64_t number = 0; number < 4; ++number) {
      int error = 0;
      const int socket = connected_socket({"127.0.0.1"}, port, std::chrono::seconds(1), &error);
      EXPECT_GE(socket, 0);
      EXPECT_EQ(::send(socket, &number, sizeof number, 0), static_cast<ssize_t>(sizeof number));
      sockets.push_back(socket);
    }
  return sockets;
}

/// Strangers connect after both ranks have published their addresses. Only then do the ranks go on.
class VisitedStore : public c10d::PrefixStore {
 public:
  VisitedStore(const c10::intrusive_ptr<c10d::Store>& store, std::barrier<>* told,
               std::barrier<>* visited)
      : PrefixStore("", store), told_(told), visited_(visited) {}

  using PrefixStore::set;
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    PrefixStore::set(key, value);
    told_->arrive_and_wait();
    visited_->arrive_and_wait();
  }

 private:
  std::barrier<>*told_, *visited_;
};

/// A rank's connection is the first one that starts with its number; zeros are a valid number.
TEST(BackendGloo, StrangersThatSendSmallNumbersTakeNoRanksPlace) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  for (int round = 0; round < 4; ++round) {  // the side that listens depends on the ports
    std::barrier<> told(3), visited(3);
    const auto meet = [&](int rank) {
      auto spec =
          spec_of(rank, c10::make_intrusive<VisitedStore>(
                            c10::make_intrusive<c10d::PrefixStore>(std::to_string(round), store),
                            &told, &visited));
      spec.single_host = true;
      const auto backend = make_gloo_backend(spec);
      at::Tensor mine = at::full({1}, rank, at::kLong), all = at::zeros({2}, at::kLong);
      backend->_allgather_base(all, mine)->wait();
      EXPECT_TRUE(all.equal(at::arange(2)));
    };
    auto first = std::async(std::launch::async, meet, 0);
    auto second = std::async(std::launch::async, meet, 1);
    told.arrive_and_wait();
    const std::vector<int> sockets = visit_ports();
    visited.arrive_and_wait();
    EXPECT_GE(sockets.size(), 8u);
    EXPECT_NO_THROW(first.get());
    EXPECT_NO_THROW(second.get());
    for (const int socket : sockets) ::close(socket);
  }
}

}  // namespace
}  // namespace lockstep
