#pragma once

// Internal. No libtorch here.

#include <optional>
#include <string>
#include <string_view>

#include "lockstep/parallel_state/secret.h"

/// How the two ends of a connection prove to each other, before anything else, that they know the
/// secret:
///
///   server   greeting   kProofMagic, a fresh nonce
///   client   answer     kProofMagic, a fresh nonce of its own, signature of both nonces
///   server   verdict    kProofHolds and its own signature of both; or kProofFails, and it closes
///
/// Both nonces are in both signatures, so that a recorded exchange is of no use later. The two
/// signatures have different labels, so that neither end can send the other's signature back.
namespace lockstep {

constexpr size_t kNonceBytes = 32, kSignatureBytes = 32;
constexpr std::string_view kProofMagic = "lockstep/secret1";  // 16 bytes
constexpr char kProofHolds = 'y', kProofFails = 'n';
constexpr size_t kGreetingBytes = kProofMagic.size() + kNonceBytes;
constexpr size_t kAnswerBytes = kProofMagic.size() + kNonceBytes + kSignatureBytes;

/// The server's part in one proof.
class ProofOfClient {
 public:
  ProofOfClient() : nonce_(random_bytes(kNonceBytes)) {}

  std::string greeting() const;
  /// Whether `bytes` may be the beginning of an answer.
  static bool may_be_answer(std::string_view bytes);
  /// The verdict that begins with kProofHolds; nothing if the answer, kAnswerBytes long, does not
  /// prove that the client knows the secret.
  std::optional<std::string> verdict(const Secret& secret, std::string_view answer) const;

 private:
  std::string nonce_;
};

/// The client's part.
class ProofOfServer {
 public:
  /// `greeting`: kGreetingBytes long.
  explicit ProofOfServer(std::string_view greeting)
      : nonces_(std::string(greeting.substr(kProofMagic.size())) + random_bytes(kNonceBytes)) {}

  std::string answer(const Secret& secret) const;
  /// Whether that signature, which follows kProofHolds, was made with the secret.
  bool holds(const Secret& secret, std::string_view signature) const;

 private:
  std::string nonces_;
};

}  // namespace lockstep
