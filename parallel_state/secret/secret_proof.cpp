#include "lockstep/parallel_state/secret_proof.h"

#include "lockstep/parallel_state/sha256.h"

namespace lockstep {
namespace {

constexpr char kClient[] = "lockstep store: client", kServer[] = "lockstep store: server";

}  // namespace

std::string ProofOfClient::greeting() const { return std::string(kProofMagic) + nonce_; }

bool ProofOfClient::may_be_answer(std::string_view bytes) {
  return kProofMagic.starts_with(bytes.substr(0, kProofMagic.size()));
}

std::optional<std::string> ProofOfClient::verdict(const Secret& secret,
                                                  std::string_view answer) const {
  if (answer.size() != kAnswerBytes || !may_be_answer(answer)) return std::nullopt;
  const std::string nonces = nonce_ + std::string(answer.substr(kProofMagic.size(), kNonceBytes));
  const std::string_view signature = answer.substr(kAnswerBytes - kSignatureBytes);
  if (!equal_in_constant_time(signature, secret.sign(kClient, nonces))) return std::nullopt;
  return kProofHolds + secret.sign(kServer, nonces);
}

std::string ProofOfServer::answer(const Secret& secret) const {
  return std::string(kProofMagic) + nonces_.substr(kNonceBytes) + secret.sign(kClient, nonces_);
}

bool ProofOfServer::holds(const Secret& secret, std::string_view signature) const {
  return equal_in_constant_time(signature, secret.sign(kServer, nonces_));
}

}  // namespace lockstep
