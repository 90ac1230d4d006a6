#pragma once

#include <string>

namespace lockstep {

/// Files in PEM form with which Gloo encrypts what the ranks send each other, and each rank proves
/// that it belongs to them: its private key, its certificate, and the authority that has signed the
/// certificates of all ranks. Gloo loads the system's libssl when the first group is connected.
struct GlooTlsFiles {
  std::string key;
  std::string certificate;
  std::string ca;

  /// ConfigError naming the field and the file if one cannot be read.
  void check() const;
};

}  // namespace lockstep
