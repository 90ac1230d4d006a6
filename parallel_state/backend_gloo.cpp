#include <dlfcn.h>

#include <fstream>

#include <c10/util/env.h>
#include <torch/csrc/distributed/c10d/GlooDeviceFactory.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "lockstep/core/check.h"
#include "lockstep/parallel_state/backends.h"
#include "lockstep/parallel_state/network.h"

namespace lockstep {
namespace {

using Gloo = c10d::ProcessGroupGloo;

/// Gloo takes the first of these that it finds, and says only "libssl not found" otherwise.
void require_libssl() {
  for (const char* name : {"libssl.so", "libssl.so.1.1"})
    if (::dlopen(name, RTLD_LAZY | RTLD_LOCAL)) return;
  fail<ConfigError>(
      "parallel.gloo_tls_key_file: is set, but Gloo's TLS needs the library libssl.so "
      "(Debian: libssl-dev), which this host does not have");
}

/// Gloo's factory takes the files from the environment.
std::shared_ptr<gloo::transport::Device> make_tls_device(const GlooTlsFiles& files,
                                                         const std::string& address) {
  files.check();
  require_libssl();
  c10::utils::set_env("GLOO_DEVICE_TRANSPORT_TCP_TLS_PKEY", files.key.c_str());
  c10::utils::set_env("GLOO_DEVICE_TRANSPORT_TCP_TLS_CERT", files.certificate.c_str());
  c10::utils::set_env("GLOO_DEVICE_TRANSPORT_TCP_TLS_CA_FILE", files.ca.c_str());
  return c10d::GlooDeviceRegistry()->Create("TCP_TLS", "", address, /*lazyInit=*/false);
}

c10::intrusive_ptr<Gloo::Options> make_options(const BackendSpec& spec) {
  if (!spec.single_host && !spec.gloo_tls) return Gloo::Options::create_default(spec.timeout);
  auto options = Gloo::Options::create(spec.timeout);
  const std::string address = spec.single_host ? "127.0.0.1" : gloo_address().address;
  options->devices.push_back(spec.gloo_tls ? make_tls_device(*spec.gloo_tls, address)
                                           : Gloo::createDeviceForHostname(address));
  return options;
}

}  // namespace

void GlooTlsFiles::check() const {
  const auto check_file = [](const char* field, const std::string& path) {
    require<ConfigError>(std::ifstream(path).good(), "parallel.gloo_tls_{}_file: cannot read '{}'",
                         field, path);
  };
  check_file("key", key);
  check_file("certificate", certificate);
  check_file("ca", ca);
}

c10::intrusive_ptr<c10d::Backend> make_gloo_backend(const BackendSpec& spec) {
  auto options = make_options(spec);
  options->group_name = spec.group_name;
  options->global_ranks_in_group.assign(spec.ranks.begin(), spec.ranks.end());
  return c10::make_intrusive<Gloo>(spec.store, spec.rank, static_cast<int>(spec.ranks.size()),
                                   options);
}

}  // namespace lockstep
