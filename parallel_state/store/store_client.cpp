#include "lockstep/parallel_state/store_client.h"

#include <algorithm>
#include <thread>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStoreBackend.hpp>

#include "lockstep/core/check.h"
#include "lockstep/parallel_state/key_values.h"
#include "lockstep/parallel_state/store_door.h"

namespace lockstep {
namespace {

using c10d::detail::QueryType;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr bool same(StoreQuery ours, QueryType theirs) {
  return static_cast<uint8_t>(ours) == static_cast<uint8_t>(theirs);
}
static_assert(same(StoreQuery::set, QueryType::SET) &&
              same(StoreQuery::compare_set, QueryType::COMPARE_SET) &&
              same(StoreQuery::get, QueryType::GET) && same(StoreQuery::add, QueryType::ADD) &&
              same(StoreQuery::check, QueryType::CHECK) &&
              same(StoreQuery::get_num_keys, QueryType::GETNUMKEYS) &&
              same(StoreQuery::delete_key, QueryType::DELETE_KEY) &&
              same(StoreQuery::append, QueryType::APPEND) &&
              same(StoreQuery::multi_get, QueryType::MULTI_GET) &&
              same(StoreQuery::multi_set, QueryType::MULTI_SET));

constexpr uint64_t kLargestValue = uint64_t{1} << 30;
constexpr char kKeyPrefix[] = "/";  // as libtorch's client has it

template <class T>
T receive_value(Connection& connection, Connection::Deadline deadline) {
  T value{};
  connection.receive(&value, sizeof value, deadline);
  return value;
}

StoreClient::Bytes receive_bytes(Connection& connection, Connection::Deadline deadline) {
  const auto length = receive_value<uint64_t>(connection, deadline);
  if (length > kLargestValue)
    C10_THROW_ERROR(DistNetworkError,
                    fmt::format("found an answer of {} bytes, allowed: {} at most; the process "
                                "listening there is not a c10d store",
                                length, kLargestValue));
  StoreClient::Bytes bytes(length);
  connection.receive(bytes.data(), bytes.size(), deadline);
  return bytes;
}

}  // namespace

class StoreClient::Request {
 public:
  explicit Request(QueryType type) { value(type); }

  template <class T>
  Request& value(T value) {
    text_.append(reinterpret_cast<const char*>(&value), sizeof value);
    return *this;
  }
  Request& bytes(const Bytes& bytes) {
    value(uint64_t{bytes.size()});
    text_.append(bytes.begin(), bytes.end());
    return *this;
  }
  Request& key(const std::string& key) {
    value(uint64_t{key.size() + sizeof kKeyPrefix - 1});
    text_ += kKeyPrefix + key;
    return *this;
  }
  Request& keys(const Keys& keys) {
    value(uint64_t{keys.size()});
    for (const std::string& one : keys) key(one);
    return *this;
  }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

StoreClient::StoreClient(StoreAddress address, milliseconds timeout)
    : Store(timeout), address_(std::move(address)) {}

c10::intrusive_ptr<c10d::Store> StoreClient::clone() {
  return c10::make_intrusive<StoreClient>(address_, getTimeout());
}

template <class Answer>
auto StoreClient::ask(const Request& request, Answer answer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto begin = steady_clock::now(), deadline = begin + getTimeout();
  try {
    connect(deadline);
    connection_.send(request.text(), deadline);
    return answer(connection_, deadline);
  } catch (const SecretRefused& refused) {
    C10_THROW_ERROR(DistNetworkError, address_.server + " refuses: " + refused.what());
  } catch (const Connection::Ended&) {
    C10_THROW_ERROR(DistNetworkError, address_.server + " has exited");
  } catch (const Connection::NoSocket& error) {
    C10_THROW_ERROR(DistNetworkError, address_.server + " was not asked: " + error.what());
  } catch (const Connection::Silent& silent) {
    const auto end = std::min(steady_clock::now(), deadline);
    const bool timed_out = deadline - end < milliseconds(1);  // the precision of a step
    const std::chrono::duration<double> passed = end - begin;
    C10_THROW_ERROR(
        DistNetworkError,
        fmt::format("{} has not answered for {:.1f} s{}", address_.server, passed.count(),
                    timed_out ? "" : fmt::format(" ({})", silent.what())));
  }
}

/// Does nothing while it is connected.
void StoreClient::connect(Connection::Deadline deadline) {
  constexpr milliseconds kPause{20};
  while (connection_.open(address_.host, address_.port, deadline)) {
    try {
      return enter(deadline);
    } catch (const Connection::TurnedAway& reason) {
      if (steady_clock::now() + kPause >= deadline) throw Connection::Silent(reason.what());
      std::this_thread::sleep_for(kPause);
    }
  }
}

/// Begins a new connection.
void StoreClient::enter(Connection::Deadline deadline) {
  if (address_.secret) enter_store(connection_, *address_.secret, deadline);
  connection_.settle();
  if (address_.secret) return;
  connection_.send(Request(QueryType::VALIDATE).value(c10d::detail::validationMagicNumber).text(),
                   deadline);
}

void StoreClient::set(const std::string& key, const Bytes& value) {
  ask(Request(QueryType::SET).key(key).bytes(value), [](auto&, auto) {});
}

StoreClient::Bytes StoreClient::compareSet(const std::string& key, const Bytes& expected,
                                           const Bytes& wanted) {
  return ask(Request(QueryType::COMPARE_SET).key(key).bytes(expected).bytes(wanted), receive_bytes);
}

StoreClient::Bytes StoreClient::get(const std::string& key) {
  wait({key});
  return ask(Request(QueryType::GET).key(key), receive_bytes);
}

int64_t StoreClient::add(const std::string& key, int64_t value) {
  return ask(Request(QueryType::ADD).key(key).value(value), receive_value<int64_t>);
}

bool StoreClient::deleteKey(const std::string& key) {
  return ask(Request(QueryType::DELETE_KEY).key(key), receive_value<int64_t>) == 1;
}

bool StoreClient::check(const Keys& keys) {
  using c10d::detail::CheckResponseType;
  return ask(Request(QueryType::CHECK).keys(keys), receive_value<CheckResponseType>) ==
         CheckResponseType::READY;
}

int64_t StoreClient::getNumKeys() {
  return ask(Request(QueryType::GETNUMKEYS), receive_value<int64_t>);
}

void StoreClient::wait(const Keys& keys, const milliseconds& timeout) {
  const auto deadline = steady_clock::now() + timeout;
  for (milliseconds pause(1); !check(keys); pause = std::min(2 * pause, milliseconds(50))) {
    if (steady_clock::now() >= deadline)
      C10_THROW_ERROR(
          DistStoreError,
          fmt::format("'{}' was not written to the store within {:.1f} s", fmt::join(keys, "', '"),
                      static_cast<double>(timeout.count()) / 1e3));
    std::this_thread::sleep_for(pause);
  }
}

void StoreClient::append(const std::string& key, const Bytes& value) {
  ask(Request(QueryType::APPEND).key(key).bytes(value), [](auto&, auto) {});
}

std::vector<StoreClient::Bytes> StoreClient::multiGet(const Keys& keys) {
  wait(keys);
  return ask(Request(QueryType::MULTI_GET).keys(keys), [&](Connection& connection, auto deadline) {
    std::vector<Bytes> values;
    for (size_t i = 0; i < keys.size(); ++i) values.push_back(receive_bytes(connection, deadline));
    return values;
  });
}

void StoreClient::multiSet(const Keys& keys, const std::vector<Bytes>& values) {
  TORCH_CHECK(keys.size() == values.size(), "multiSet: ", keys.size(), " keys, ", values.size(),
              " values");
  Request request(QueryType::MULTI_SET);
  request.value(uint64_t{keys.size()});
  for (size_t i = 0; i < keys.size(); ++i) request.key(keys[i]).bytes(values[i]);
  ask(request, [](auto&, auto) {});
}

c10::intrusive_ptr<c10d::Store> store_below(const c10::intrusive_ptr<c10d::Store>& store) {
  const auto prefixed = c10::dynamic_intrusive_pointer_cast<c10d::PrefixStore>(store);
  return prefixed ? prefixed->getUnderlyingNonPrefixStore() : store;
}

}  // namespace lockstep
