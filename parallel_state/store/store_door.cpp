#include "lockstep/parallel_state/store_door.h"

#include <algorithm>
#include <thread>

#include "lockstep/core/check.h"
#include "lockstep/parallel_state/secret_proof.h"

namespace lockstep {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr char kNoStore[] = "the process listening there gave an unexpected answer";

[[noreturn]] void refuse(const char* what) {
  fail<SecretRefused>(
      "secret: rank 0, which serves it, has {}; allowed: the same on all ranks, in LOCKSTEP_SECRET "
      "or LOCKSTEP_SECRET_FILE",
      what);
}

std::string receive_text(Connection& connection, size_t bytes, Connection::Deadline deadline) {
  std::string text(bytes, '\0');
  connection.receive(text.data(), bytes, deadline);
  return text;
}

/// Empty if this process was let in; otherwise the reason.
std::string try_to_enter(const std::string& host, int port, const Secret& secret,
                         Connection::Deadline deadline,
                         const std::function<bool()>& open_store_answers) {
  Connection connection;
  bool connected = false;
  try {
    connected = connection.open(host, port, deadline);
    enter_store(connection, secret, deadline);
    return "";
  } catch (const Connection::Silent& silent) {
    if (!connected) return silent.what();
    if (open_store_answers()) refuse("none, and this rank has one");
    return kNoStore;
  } catch (const Connection::Ended& ended) {
    return ended.what();
  }
}

}  // namespace

void enter_store(Connection& connection, const Secret& secret, Connection::Deadline deadline) {
  const std::string greeting = receive_text(connection, kGreetingBytes, deadline);
  if (!greeting.starts_with(kProofMagic)) {
    connection.close();
    throw Connection::Silent(kNoStore);
  }
  const ProofOfServer proof(greeting);
  connection.send(proof.answer(secret), deadline);
  const bool proved = receive_text(connection, 1, deadline).front() == kProofHolds;
  if (!proved || !proof.holds(secret, receive_text(connection, kSignatureBytes, deadline))) {
    connection.close();
    refuse("a different one than this rank");
  }
}

std::string wait_to_enter_store(const std::string& host, int port, const Secret& secret,
                                Connection::Deadline deadline, const std::function<bool()>& give_up,
                                const std::function<bool()>& open_store_answers) {
  constexpr milliseconds kPause{20}, kLeast{10}, kMost{2000};
  for (;;) {
    const auto now = steady_clock::now();
    const auto until = std::clamp(deadline, now + kLeast, now + kMost);
    const std::string reason = try_to_enter(host, port, secret, until, open_store_answers);
    if (reason.empty() || steady_clock::now() >= deadline || (give_up && give_up())) return reason;
    std::this_thread::sleep_for(kPause);
  }
}

void check_no_greeting(std::string_view received) {
  if (!received.empty() && kProofMagic.starts_with(received.substr(0, kProofMagic.size())))
    refuse("one, and this rank has none");
}

}  // namespace lockstep
