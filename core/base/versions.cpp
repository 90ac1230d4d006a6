#include "lockstep/core/versions.h"

#include <fmt/format.h>
#include <google/protobuf/stubs/common.h>

namespace lockstep {

std::string protobuf_version() {
  return google::protobuf::internal::VersionString(GOOGLE_PROTOBUF_VERSION);
}

std::string fmt_version() {
  return fmt::format("{}.{}.{}", FMT_VERSION / 10000, FMT_VERSION / 100 % 100, FMT_VERSION % 100);
}

}  // namespace lockstep
