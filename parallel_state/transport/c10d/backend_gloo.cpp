#include <pthread.h>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "lockstep/parallel_state/backends.h"

namespace lockstep {
namespace {

using Gloo = c10d::ProcessGroupGloo;

// While this lives, threads that the calling thread starts get Linux's batch class, which does not
// interrupt a running thread when it wakes. Gloo's event loop polls without rest while a
// connection's lock is taken. If it interrupts the sender inside that lock, both wait for the
// sender's next time slice: with more ranks than cores that made small collectives up to six times
// slower (benchmarks/collectives).
class BatchThreads {
 public:
  BatchThreads() {
    sched_param parameters{};
    if (pthread_getschedparam(pthread_self(), &policy_, &parameters) != 0) return;
    changed_ = policy_ == SCHED_OTHER && set(SCHED_BATCH);
  }
  ~BatchThreads() {
    if (changed_) set(policy_);
  }
  BatchThreads(const BatchThreads&) = delete;
  BatchThreads& operator=(const BatchThreads&) = delete;

 private:
  static bool set(int policy) {
    const sched_param parameters{};
    return pthread_setschedparam(pthread_self(), policy, &parameters) == 0;
  }

  int policy_ = SCHED_OTHER;
  bool changed_ = false;
};

/// Gloo waits five times its timeout for a connection, so it gets a fifth of ours while it
/// connects. For the addresses of slow ranks it may wait the whole timeout.
constexpr int kConnectFactor = 5;

class PatientStore : public c10d::PrefixStore {
 public:
  PatientStore(const c10::intrusive_ptr<c10d::Store>& store, std::chrono::milliseconds timeout)
      : PrefixStore("gloo", store), timeout_(timeout) {}

  using PrefixStore::wait;
  void wait(const std::vector<std::string>& keys,
            const std::chrono::milliseconds& /*of_gloo*/) override {
    PrefixStore::wait(keys, timeout_);
  }

 private:
  std::chrono::milliseconds timeout_;
};

c10::intrusive_ptr<Gloo::Options> make_options(const BackendSpec& spec) {
  const std::chrono::milliseconds timeout = spec.timeout / kConnectFactor;
  if (!spec.single_host) return Gloo::Options::create_default(timeout);
  auto options = Gloo::Options::create(timeout);
  options->devices.push_back(Gloo::createDeviceForHostname("127.0.0.1"));
  return options;
}

struct NumbersUsed : std::exception {};

class ClosedStore : public c10d::PrefixStore {
 public:
  explicit ClosedStore(const c10::intrusive_ptr<c10d::Store>& store) : PrefixStore("", store) {}

  using PrefixStore::set;
  void set(const std::string& /*key*/, const std::vector<uint8_t>& /*value*/) override {
    throw NumbersUsed();
  }
};

/// Gloo numbers the connections that a listener expects from 0 and accepts the first one that
/// begins with a number, whoever sent it. Bytes that are not a Gloo greeting begin with a small
/// number more often than with any other (zeros are 0), so the small numbers go to a group whose
/// construction ends before it connects.
void use_up_small_numbers(const c10::intrusive_ptr<Gloo::Options>& options,
                          const BackendSpec& spec) {
  constexpr int kNumbers = 256;
  try {
    Gloo(c10::make_intrusive<ClosedStore>(spec.store), 0, kNumbers, options);
  } catch (const NumbersUsed&) {
  }
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_gloo_backend(const BackendSpec& spec) {
  const BatchThreads batch_threads;
  auto options = make_options(spec);
  use_up_small_numbers(options, spec);
  options->group_name = spec.group_name;
  options->global_ranks_in_group.assign(spec.ranks.begin(), spec.ranks.end());
  auto backend =
      c10::make_intrusive<Gloo>(c10::make_intrusive<PatientStore>(spec.store, spec.timeout),
                                spec.rank, static_cast<int>(spec.ranks.size()), options);
  backend->setTimeout(spec.timeout);
  return backend;
}

}  // namespace lockstep
