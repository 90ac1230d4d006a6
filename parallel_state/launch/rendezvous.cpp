#include "lockstep/parallel_state/rendezvous.h"

#include <unistd.h>

#include <cstdio>
#include <thread>

#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStoreBackend.hpp>

#include "lockstep/core/check.h"
#include "lockstep/parallel_state/agent_rounds.h"
#include "lockstep/parallel_state/closed_store.h"
#include "lockstep/parallel_state/gathering.h"
#include "lockstep/parallel_state/job_secret.h"
#include "lockstep/parallel_state/network.h"
#include "lockstep/parallel_state/secret_proof.h"
#include "lockstep/parallel_state/store_client.h"
#include "lockstep/parallel_state/store_door.h"

namespace lockstep {
namespace {

using Clock = Membership::Clock;
using std::chrono::milliseconds;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

using SecretPtr = std::shared_ptr<const Secret>;

constexpr char kRunId[] = "lockstep run id";

StorePtr client_of(const LaunchEnvironment& environment, milliseconds timeout, SecretPtr secret) {
  const bool of_launcher = environment.agent_serves_store;
  StoreAddress address = {
      .host = environment.store_address(),
      .port = environment.master_port,
      .server = fmt::format("{}:{}", environment.store_address(), environment.master_port),
      .of_launcher = of_launcher,
      .secret = std::move(secret)};
  address.server = of_launcher ? "the launcher's store at " + address.server
                               : "rank 0, which serves the store at " + address.server + ",";
  return c10::make_intrusive<StoreClient>(std::move(address), timeout);
}

/// " (Slurm)". Empty if RANK and WORLD_SIZE are set: without an agent's store nothing shows whether
/// torchrun has set them.
std::string launcher_of(const LaunchEnvironment& environment) {
  if (environment.launcher == Launcher::torchrun && !environment.agent_serves_store) return "";
  return fmt::format(" ({})", to_string(environment.launcher));
}

[[noreturn]] void fail_at_store(const LaunchEnvironment& environment, const char* verb,
                                const std::string& reason) {
  fail<CommunicationError>("rank {} cannot {} the store at {}:{}{}: {}", environment.rank, verb,
                           environment.store_address(), environment.master_port,
                           launcher_of(environment), reason);
}

[[noreturn]] void fail_to_use_store(const LaunchEnvironment& environment, const c10::Error& error) {
  fail<CommunicationError>("{}: rank {} cannot use the store{}", error.what_without_backtrace(),
                           environment.rank, launcher_of(environment));
}

/// One of libtorch's stores, which is open to all.
std::shared_ptr<void> open_store(const LaunchEnvironment& environment, milliseconds timeout,
                                 int bound) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(environment.master_port);
  options.waitWorkers = false;
  options.timeout = timeout;
  options.isServer = true;
  options.masterListenFd = bound;
  return std::make_shared<StorePtr>(
      c10::make_intrusive<c10d::TCPStore>(environment.store_address(), options));
}

/// Reports at its end how many connections it has refused.
std::shared_ptr<void> closed_store(const LaunchEnvironment& environment, SecretPtr secret,
                                   int bound) {
  // Each rank has two connections, and all ranks may come at once.
  DoorLimits limits;
  limits.waiting = std::max(limits.waiting, 2 * static_cast<size_t>(environment.world_size));
  const std::string address =
      fmt::format("{}:{}", environment.store_address(), environment.master_port);
  return {new ClosedStore(bound, std::move(secret), limits), [address](ClosedStore* store) {
            store->close();
            if (store->refused() > 0)
              std::fprintf(stderr, "lockstep: rank 0: %s at %s\n",
                           refused_connections(store->refused()).c_str(), address.c_str());
            delete store;
          }};
}

/// Starts the server, which goes to spec.server.
StorePtr serve(const LaunchEnvironment& environment, MembershipSpec& spec) {
  try {
    const int bound = bound_socket(environment.store_address(), environment.master_port,
                                   !environment.single_host());
    spec.server = spec.secret ? closed_store(environment, spec.secret, bound)
                              : open_store(environment, spec.timeout, bound);
    const StorePtr store = client_of(environment, spec.timeout, spec.secret);
    store->set(kRunId, environment.run_id);
    return store;
  } catch (const CommunicationError& error) {
    fail_at_store(environment, "serve", error.what());
  }
}

/// libtorch's client waits forever for the first answer of a server that is no store, and prints
/// stack traces to standard error when it has to try again. So this asks first, in the same
/// protocol.
std::string wait_for_open_store(const LaunchEnvironment& environment, Clock::time_point deadline,
                                const std::function<bool()>& give_up,
                                const std::function<void(const std::string&)>& other_answer = {}) {
  using c10d::detail::QueryType;
  const auto append = [](std::string& text, const auto& value) {
    text.append(reinterpret_cast<const char*>(&value), sizeof value);
  };
  std::string request, echo;
  append(request, QueryType::VALIDATE);
  append(request, c10d::detail::validationMagicNumber);
  append(request, QueryType::PING);
  append(echo, static_cast<uint32_t>(::getpid()));
  return wait_for_answer(environment.store_address(), environment.master_port, request + echo, echo,
                         deadline, give_up, other_answer);
}

std::string wait_for_store(const LaunchEnvironment& environment, const SecretPtr& secret,
                           Clock::time_point deadline, const std::function<bool()>& give_up) {
  if (environment.agent_serves_store) return wait_for_open_store(environment, deadline, give_up);
  if (!secret) return wait_for_open_store(environment, deadline, give_up, check_no_greeting);
  const auto is_open = [&] {
    return wait_for_open_store(environment, Clock::now() + milliseconds(500), give_up).empty();
  };
  return wait_to_enter_store(environment.store_address(), environment.master_port, *secret,
                             deadline, give_up, is_open);
}

StorePtr reach(const LaunchEnvironment& environment, const MembershipSpec& spec,
               Clock::time_point deadline) {
  std::optional<std::string> obstacle;
  const auto look = [&] { return spec.obstacle && (obstacle = spec.obstacle()).has_value(); };
  const std::string reason = wait_for_store(environment, spec.secret, deadline, look);
  if (!reason.empty() && obstacle) fail_at_store(environment, "reach", *obstacle);
  if (!reason.empty())
    fail_at_store(environment, "reach",
                  fmt::format("{} did not serve it within {:.1f} s ({})",
                              environment.agent_serves_store ? "torchrun's agent" : "rank 0",
                              static_cast<double>(spec.timeout.count()) / 1e3, reason));
  return client_of(environment, spec.timeout,
                   environment.agent_serves_store ? nullptr : spec.secret);
}

void check_run_id(const LaunchEnvironment& environment, c10d::Store& store,
                  Clock::time_point deadline) {
  if (!wait_for_key(store, kRunId, environment.world_size, deadline))
    fail_at_store(environment, "use", "no rank has written a run id there");
  const std::string served = store.get_to_str(kRunId);
  if (served != environment.run_id)
    fail_at_store(environment, "use",
                  fmt::format("run id: rank 0, which serves it, has '{}', rank {} has '{}'; "
                              "allowed: the same on all ranks",
                              served, environment.rank, environment.run_id));
}

/// The launcher's store is open to all, so there a secret proves only that all ranks have the same
/// one: they sign a challenge of whichever rank came first.
AnnouncedField secret_field(const LaunchEnvironment& environment, c10d::Store& store,
                            const Secret& secret) {
  const std::string key = fmt::format("lockstep secret challenge/{}", environment.run_id);
  const std::string challenge = store.compareSet(key, "", in_hex(random_bytes(kNonceBytes)));
  return {"LOCKSTEP_SECRET", "signed as " + in_hex(secret.sign("lockstep ranks", challenge))};
}

/// The store of a run that this rank has left may remain for a moment; the next run has another.
std::unique_ptr<Membership> join_served_by_rank_0(const LaunchEnvironment& environment,
                                                  const MembershipSpec& spec,
                                                  Clock::time_point deadline) {
  constexpr milliseconds kPause{50};
  for (;;) {
    try {
      StorePtr store = reach(environment, spec, deadline);
      check_run_id(environment, *store, deadline);
      auto membership = std::make_unique<Membership>(std::move(store), spec, deadline);
      if (membership->generation() == 1) return membership;
    } catch (const SecretRefused& refused) {
      fail_at_store(environment, "use", refused.what());
    } catch (const c10::Error& error) {
      if (Clock::now() >= deadline) fail_to_use_store(environment, error);
    }
    if (Clock::now() >= deadline)
      fail_at_store(environment, "use", "the run that this rank left is still running there");
    std::this_thread::sleep_for(kPause);
  }
}

int64_t round_of_agents(const LaunchEnvironment& environment, const StorePtr& store,
                        MembershipSpec& spec, Clock::time_point deadline) {
  const auto rounds = std::make_shared<AgentRounds>(store, environment.run_id);
  if (environment.rank == 0) {
    spec.admit = [rounds] { rounds->admit(); };
    return rounds->begin();
  }
  std::optional<std::string> obstacle;
  const auto look = [&] { return spec.obstacle && (obstacle = spec.obstacle()).has_value(); };
  const auto round = rounds->await(environment.world_size, deadline, look);
  if (!round)
    fail_at_store(
        environment, "use",
        obstacle.value_or(fmt::format(
            "rank 0 did not answer within {:.1f} s; it has not come, or has left the round",
            static_cast<double>(spec.timeout.count()) / 1e3)));
  return *round;
}

/// A rank 0 that leaves the run may still answer a rank that has left it too; the next run has
/// another round.
std::unique_ptr<Membership> join_served_by_agent(const LaunchEnvironment& environment,
                                                 MembershipSpec spec, Clock::time_point deadline) {
  const StorePtr store = reach(environment, spec, deadline);
  if (spec.secret)
    spec.fields.insert(spec.fields.begin(), secret_field(environment, *store, *spec.secret));
  for (;;) {
    MembershipSpec of_round = spec;
    of_round.round = round_of_agents(environment, store, of_round, deadline);
    of_round.run_id += fmt::format("{}{}", spec.run_id.empty() ? "" : "/", *of_round.round);
    auto membership = std::make_unique<Membership>(store, std::move(of_round), deadline);
    if (membership->generation() == 1) return membership;
  }
}

}  // namespace

std::unique_ptr<Membership> join_run(const LaunchEnvironment& environment, MembershipSpec spec) {
  if (environment.world_size == 1) return nullptr;
  const Clock::time_point deadline = Clock::now() + spec.timeout;
  if (!spec.secret) spec.secret = read_job_secret();
  spec.serves_store = environment.rank == 0 && !environment.agent_serves_store;
  if (!spec.serves_store && !environment.agent_serves_store)
    return join_served_by_rank_0(environment, spec, deadline);
  try {
    if (environment.agent_serves_store)
      return join_served_by_agent(environment, std::move(spec), deadline);
    StorePtr store = serve(environment, spec);
    return std::make_unique<Membership>(std::move(store), std::move(spec), deadline);
  } catch (const c10::Error& error) {
    fail_to_use_store(environment, error);
  }
}

std::unique_ptr<Membership> join_run(const StorePtr& store, MembershipSpec spec) {
  const Clock::time_point deadline = Clock::now() + spec.timeout;
  spec.server = std::make_shared<StorePtr>(store);
  return std::make_unique<Membership>(store->clone(), std::move(spec), deadline);
}

}  // namespace lockstep
