#pragma once

// Internal.

#include <memory>
#include <string>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "lockstep/parallel_state/connection.h"
#include "lockstep/parallel_state/secret.h"

namespace lockstep {

/// The address of a store, and its server.
struct StoreAddress {
  std::string host;
  int port = 0;
  std::string server;  ///< "rank 0, which serves the store at 10.0.0.1:29500,"
  bool of_launcher = false;
  std::shared_ptr<const Secret> secret = {};  ///< that a ClosedStore asks for; null: open
};

/// A client of a c10d::TCPStore or a ClosedStore. It never waits longer than its timeout for an
/// answer, whether the server has ended, is stopped or cannot be reached; libtorch's own client
/// would wait forever. A request that fails throws a c10::DistNetworkError that begins with the
/// server: it "has exited", and then all later requests fail in the same way, or it "has not
/// answered for 5.0 s", with the reason if that is less than the timeout. A client whose request
/// got no answer reconnects for the next one. A ClosedStore may close a connection before its
/// proof, to make room for others; the client then connects again.
class StoreClient : public c10d::Store {
 public:
  /// Connects at the first request.
  StoreClient(StoreAddress address, std::chrono::milliseconds timeout);

  /// A client with its own connection.
  c10::intrusive_ptr<c10d::Store> clone() override;

  using Bytes = std::vector<uint8_t>;
  using Keys = std::vector<std::string>;
  void set(const std::string& key, const Bytes& value) override;
  Bytes compareSet(const std::string& key, const Bytes& expected, const Bytes& wanted) override;
  Bytes get(const std::string& key) override;
  int64_t add(const std::string& key, int64_t value) override;
  bool deleteKey(const std::string& key) override;
  bool check(const Keys& keys) override;
  int64_t getNumKeys() override;
  void wait(const Keys& keys) override { wait(keys, getTimeout()); }
  /// Polls, so that other threads can use this client meanwhile. DistStoreError at the end of the
  /// timeout.
  void wait(const Keys& keys, const std::chrono::milliseconds& timeout) override;
  void append(const std::string& key, const Bytes& value) override;
  std::vector<Bytes> multiGet(const Keys& keys) override;
  void multiSet(const Keys& keys, const std::vector<Bytes>& values) override;
  bool hasExtendedApi() const override { return true; }

  const StoreAddress& address() const { return address_; }
  /// Whether the server is known to have ended. Sends no request.
  bool server_has_gone() { return connection_.state() == Connection::State::ended; }
  /// Ends the requests of other threads, and all later ones.
  void interrupt() { connection_.interrupt(); }

 private:
  class Request;
  template <class Answer>
  auto ask(const Request& request, Answer answer);
  void connect(Connection::Deadline deadline);
  void enter(Connection::Deadline deadline);

  StoreAddress address_;
  std::mutex mutex_;  ///< one request at a time
  Connection connection_;
};

/// The store below all prefixes of `store`.
c10::intrusive_ptr<c10d::Store> store_below(const c10::intrusive_ptr<c10d::Store>& store);

}  // namespace lockstep
