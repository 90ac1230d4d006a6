#pragma once

// Internal. No libtorch here.

#include <functional>
#include <stdexcept>
#include <string>
#include <string_view>

#include "lockstep/parallel_state/connection.h"
#include "lockstep/parallel_state/secret.h"

namespace lockstep {

/// The two ends do not have the same secret. The message says what secret the other end, which is
/// rank 0, has.
struct SecretRefused : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Proves to the ClosedStore at the other end of a new connection that this process knows the
/// secret, and has it prove the same. Throws Connection::Ended and Silent as usual, or
/// SecretRefused.
void enter_store(Connection& connection, const Secret& secret, Connection::Deadline deadline);

/// Waits until a ClosedStore at host:port lets this process in. Returns nothing then, or why none
/// did before `deadline` or before `give_up`, which is called repeatedly, said to stop.
/// SecretRefused at once if the secrets differ, or if nobody there asks for a secret and
/// `open_store_answers` returns true.
std::string wait_to_enter_store(const std::string& host, int port, const Secret& secret,
                                Connection::Deadline deadline, const std::function<bool()>& give_up,
                                const std::function<bool()>& open_store_answers);

/// Throws SecretRefused if `received`, which is not an answer of a store, begins like the greeting
/// of a ClosedStore: this process has no secret.
void check_no_greeting(std::string_view received);

}  // namespace lockstep
