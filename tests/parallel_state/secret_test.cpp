// The secret of a job: its arithmetic against the RFCs' own numbers, the proof, and the sources
// that it is read from.

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <map>

#include "lockstep/core/error.h"
#include "lockstep/parallel_state/job_secret.h"
#include "lockstep/parallel_state/secret_proof.h"
#include "lockstep/parallel_state/sha256.h"

namespace lockstep {
namespace {

std::string hex(const Sha256Digest& digest) {
  return in_hex({reinterpret_cast<const char*>(digest.data()), digest.size()});
}

TEST(Sha256, TheVectorsOfRfc6234) {
  EXPECT_EQ(hex(sha256("abc")), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(hex(sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq")),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(hex(sha256(std::string(1'000'000, 'a'))),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
  std::string digits;
  for (int i = 0; i < 80; ++i) digits += "01234567";
  EXPECT_EQ(hex(sha256(digits)),
            "594847328451bdfa85056225462cc1d867d877fb388df0ce35f25ab5562bfbb5");
  EXPECT_EQ(hex(sha256("\x19")),
            "68aa2e2ee5dff96e3355e6c7ee373e3d6a4e17f75f9518d843709c0c9bc3e3d4");
  EXPECT_EQ(hex(sha256("\xe3\xd7\x25\x70\xdc\xdd\x78\x7c\xe3\x88\x7a\xb2\xcd\x68\x46\x52")),
            "175ee69b02ba9b58e2b0a5fd13819cea573f3940a94f825128cf4209beabb4e8");
}

/// All lengths around block boundaries: the digest of the digests of 0 to 200 bytes.
TEST(Sha256, LengthsAroundABlock) {
  std::string digests;
  for (size_t length = 0; length <= 200; ++length) digests += hex(sha256(std::string(length, 'x')));
  EXPECT_EQ(hex(sha256(digests)),
            "75013a3fd49991ead9d8a57ea80485c088443c3406a0e8fa003ed57144041eb4");
}

TEST(HmacSha256, TheVectorsOfRfc4231) {
  EXPECT_EQ(hex(hmac_sha256(std::string(20, '\x0b'), "Hi There")),
            "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  EXPECT_EQ(hex(hmac_sha256("Jefe", "what do ya want for nothing?")),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  EXPECT_EQ(hex(hmac_sha256(std::string(20, '\xaa'), std::string(50, '\xdd'))),
            "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe");
  std::string counted;
  for (int i = 1; i <= 25; ++i) counted += static_cast<char>(i);
  EXPECT_EQ(hex(hmac_sha256(counted, std::string(50, '\xcd'))),
            "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b");
  EXPECT_EQ(hex(hmac_sha256(std::string(131, '\xaa'),
                            "Test Using Larger Than Block-Size Key - Hash Key First")),
            "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
  EXPECT_EQ(hex(hmac_sha256(std::string(131, '\xaa'),
                            "This is a test using a larger than block-size key and a larger than "
                            "block-size data. The key needs to be hashed before being used by the "
                            "HMAC algorithm.")),
            "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2");
}

TEST(EqualInConstantTime, TellsTextsApart) {
  EXPECT_TRUE(equal_in_constant_time("", ""));
  EXPECT_TRUE(equal_in_constant_time("same", "same"));
  EXPECT_FALSE(equal_in_constant_time("same", "samE"));
  EXPECT_FALSE(equal_in_constant_time("same", "\x73\x61\x6d\xe5"));
  EXPECT_FALSE(equal_in_constant_time("same", "sam"));
  EXPECT_FALSE(equal_in_constant_time("sam", "same"));
}

const Secret kSecret("what all ranks know"), kOther("what all ranks knew");

TEST(SecretProof, BothEndsProveThatTheyKnowIt) {
  const ProofOfClient server;
  const ProofOfServer client(server.greeting());
  const std::string answer = client.answer(kSecret);
  ASSERT_EQ(answer.size(), kAnswerBytes);
  const auto verdict = server.verdict(kSecret, answer);
  ASSERT_TRUE(verdict);
  EXPECT_EQ(verdict->front(), kProofHolds);
  EXPECT_TRUE(client.holds(kSecret, verdict->substr(1)));
  EXPECT_FALSE(client.holds(kOther, verdict->substr(1)));
  EXPECT_FALSE(server.verdict(kOther, answer));
}

TEST(SecretProof, NoByteOfAnAnswerMayBeAnother) {
  const ProofOfClient server;
  const std::string answer = ProofOfServer(server.greeting()).answer(kSecret);
  for (size_t i = 0; i < answer.size(); ++i) {
    std::string changed = answer;
    changed[i] = static_cast<char>(changed[i] ^ 1);
    EXPECT_FALSE(server.verdict(kSecret, changed)) << i;
  }
  EXPECT_FALSE(server.verdict(kSecret, answer.substr(1)));
  EXPECT_FALSE(server.verdict(kSecret, answer + "x"));
  EXPECT_FALSE(server.verdict(kSecret, ""));
}

TEST(SecretProof, WhatWasRecordedProvesNothingLater) {
  const ProofOfClient first, second;
  EXPECT_NE(first.greeting(), second.greeting());
  const ProofOfServer client(first.greeting());
  const std::string answer = client.answer(kSecret);
  EXPECT_FALSE(second.verdict(kSecret, answer));
  // A server's signature does not pass as a client's, nor a client's as a server's.
  const std::string verdict = *first.verdict(kSecret, answer);
  std::string reflected = answer;
  reflected.replace(kAnswerBytes - kSignatureBytes, kSignatureBytes, verdict, 1, kSignatureBytes);
  EXPECT_FALSE(first.verdict(kSecret, reflected));
  EXPECT_FALSE(client.holds(kSecret, answer.substr(kAnswerBytes - kSignatureBytes)));
  EXPECT_FALSE(ProofOfServer(first.greeting()).holds(kSecret, verdict.substr(1)));
}

TEST(SecretProof, TheSecretIsInNoMessage) {
  const std::string text = "0123456789abcdef";
  const Secret secret(text);
  const ProofOfClient server;
  const ProofOfServer client(server.greeting());
  const std::string answer = client.answer(secret);
  const std::string all = server.greeting() + answer + *server.verdict(secret, answer);
  EXPECT_EQ(all.find(text), std::string::npos);
}

class JobSecret : public ::testing::Test {
 protected:
  JobSecret()
      : folder_(std::filesystem::path(::testing::TempDir()) /
                ("secret" + in_hex(random_bytes(8)))) {
    std::filesystem::create_directory(folder_);
  }
  ~JobSecret() override { std::filesystem::remove_all(folder_); }

  std::string file(const std::string& content, mode_t mode = 0600) const {
    const std::string path = folder_ / "secret";
    std::ofstream(path, std::ios::binary) << content;
    ::chmod(path.c_str(), mode);
    return path;
  }

  static std::shared_ptr<const Secret> read(const std::map<std::string, std::string>& variables) {
    return read_job_secret([&](const char* name) -> std::optional<std::string> {
      const auto found = variables.find(name);
      return found == variables.end() ? std::nullopt : std::optional(found->second);
    });
  }

  static std::string refusal(const std::map<std::string, std::string>& variables) {
    try {
      read(variables);
      return "";
    } catch (const ConfigError& error) {
      return error.what();
    }
  }

  std::filesystem::path folder_;
};

std::string signed_by(const std::shared_ptr<const Secret>& secret) {
  return secret->sign("label", "text");
}

TEST_F(JobSecret, OfAVariableOrAFileOrNone) {
  const std::string text = "sixteen bytes or";
  EXPECT_EQ(read({}), nullptr);
  const std::string expected = signed_by(std::make_shared<Secret>(text));
  EXPECT_EQ(signed_by(read({{"LOCKSTEP_SECRET", text}})), expected);
  for (const char* end : {"", "\n"})
    EXPECT_EQ(signed_by(read({{"LOCKSTEP_SECRET_FILE", file(text + end)}})), expected);
  EXPECT_NE(signed_by(read({{"LOCKSTEP_SECRET_FILE", file(text + "\n\n")}})), expected);
  EXPECT_EQ(signed_by(read({{"LOCKSTEP_SECRET_FILE", file(text, 0400)}})), expected);
}

TEST_F(JobSecret, WhatCannotServeIsRefusedWithoutShowingIt) {
  EXPECT_EQ(refusal({{"LOCKSTEP_SECRET", "fifteen bytes.."}}),
            "environment variable LOCKSTEP_SECRET: found 15 bytes, allowed: 16 or more");
  EXPECT_EQ(refusal({{"LOCKSTEP_SECRET", ""}}),
            "environment variable LOCKSTEP_SECRET: found 0 bytes, allowed: 16 or more");
  EXPECT_EQ(refusal({{"LOCKSTEP_SECRET", "sixteen bytes or"}, {"LOCKSTEP_SECRET_FILE", "x"}}),
            "environment variables LOCKSTEP_SECRET and LOCKSTEP_SECRET_FILE: both are set; "
            "allowed: one of them");
  const auto of_file = [&](const std::string& path, const std::string& reason) {
    EXPECT_EQ(refusal({{"LOCKSTEP_SECRET_FILE", path}}),
              "environment variable LOCKSTEP_SECRET_FILE: '" + path + "' " + reason +
                  "; allowed: a file with 16 to 65536 bytes that its owner alone can use (chmod "
                  "600)");
  };
  of_file(file("fifteen bytes..\n"), "has 15 bytes");
  of_file(file("sixteen bytes or", 0644), "has mode 644, which gives other users access");
  of_file(file("sixteen bytes or", 0620), "has mode 620, which gives other users access");
  of_file(file(std::string(70000, 'x'), 0600),
          "cannot be read: found 70000 bytes or more, allowed: up to 65536");
  of_file(folder_ / "none", "cannot be read: No such file or directory");
  of_file(folder_, "cannot be read: found no regular file");
  const std::string pipe = folder_ / "pipe";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  of_file(pipe, "cannot be read: found no regular file");
}

}  // namespace
}  // namespace lockstep
