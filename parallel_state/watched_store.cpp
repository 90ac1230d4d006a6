#include "lockstep/parallel_state/watched_store.h"

#include <poll.h>
#include <unistd.h>

#include "lockstep/parallel_state/network.h"

namespace lockstep {
namespace {

using Bytes = std::vector<uint8_t>;
using Keys = std::vector<std::string>;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

/// Holds a second connection to the server, over which nothing is sent, and looks whether it
/// stands.
class WatchedStore : public c10d::Store {
 public:
  WatchedStore(StorePtr store, int connection)
      : Store(store->getTimeout()), store_(std::move(store)), connection_(connection) {}
  ~WatchedStore() override { ::close(connection_); }

  StorePtr clone() override {
    return c10::make_intrusive<WatchedStore>(served().clone(), ::dup(connection_));
  }
  void setTimeout(const std::chrono::milliseconds& timeout) override {
    Store::setTimeout(timeout);
    store_->setTimeout(timeout);
  }
  void set(const std::string& key, const Bytes& value) override { served().set(key, value); }
  Bytes compareSet(const std::string& key, const Bytes& expected, const Bytes& wanted) override {
    return served().compareSet(key, expected, wanted);
  }
  Bytes get(const std::string& key) override { return served().get(key); }
  int64_t add(const std::string& key, int64_t value) override { return served().add(key, value); }
  bool deleteKey(const std::string& key) override { return served().deleteKey(key); }
  bool check(const Keys& keys) override { return served().check(keys); }
  int64_t getNumKeys() override { return served().getNumKeys(); }
  void wait(const Keys& keys) override { served().wait(keys); }
  void wait(const Keys& keys, const std::chrono::milliseconds& timeout) override {
    served().wait(keys, timeout);
  }
  void append(const std::string& key, const Bytes& value) override { served().append(key, value); }
  std::vector<Bytes> multiGet(const Keys& keys) override { return served().multiGet(keys); }
  void multiSet(const Keys& keys, const std::vector<Bytes>& values) override {
    served().multiSet(keys, values);
  }
  bool hasExtendedApi() const override { return store_->hasExtendedApi(); }

 private:
  c10d::Store& served() const {
    pollfd state = {.fd = connection_, .events = POLLRDHUP, .revents = 0};
    if (::poll(&state, 1, 0) > 0)
      C10_THROW_ERROR(DistNetworkError, "the process that served the store has ended");
    return *store_;
  }

  StorePtr store_;
  int connection_;
};

}  // namespace

StorePtr watch_store(StorePtr store, const std::string& host, int port) {
  const int connection = connected_socket(host, port);
  if (connection < 0) return store;
  return c10::make_intrusive<WatchedStore>(std::move(store), connection);
}

}  // namespace lockstep
