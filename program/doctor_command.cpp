#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <thread>

#include <ATen/Context.h>
#include <torch/version.h>

#include "lockstep/core/error.h"
#include "lockstep/core/versions.h"
#include "lockstep/parallel_state/cpu_traits.h"
#include "lockstep/parallel_state/devices.h"
#include "lockstep/parallel_state/launch_environment.h"
#include "lockstep/parallel_state/network.h"
#include "lockstep/parallel_state/self_test.h"
#include "lockstep/program/commands.h"

namespace lockstep {
namespace {

using Json = nlohmann::ordered_json;

/// "13.0" for 13000.
std::string cuda_version() {
  const long version =
      at::detail::getCUDAHooks().hasCUDART() ? at::detail::getCUDAHooks().versionCUDART() : 0;
  if (version == 0) return "not built in";
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

std::string or_absent(const std::string& version) {
  return version.empty() ? "not built in" : version;
}

Json launch_report() {
  try {
    const LaunchEnvironment environment = read_launch_environment();
    return {{"launcher", to_string(environment.launcher)},
            {"rank", environment.rank},
            {"world_size", environment.world_size},
            {"master_address", environment.master_address},
            {"master_port", environment.master_port}};
  } catch (const std::exception& error) {
    return {{"error", error.what()}};
  }
}

std::string direct_memory_report() {
  try {
    const std::string obstacle = direct_memory_obstacle();
    return obstacle.empty() ? "ranks of this host read each other's memory"
                            : "no (" + obstacle + "); ranks of this host send messages";
  } catch (const ConfigError& error) {
    return error.what();
  }
}

Json network_report() {
  const GlooAddress gloo = gloo_address();
  Json addresses = Json::array();
  for (const NetworkAddress& address : network_addresses())
    addresses.push_back({{"interface", address.interface}, {"address", address.address}});
  return {{"gloo_interface", gloo.interface},
          {"gloo_address", gloo.address},
          {"chosen_by", gloo.reason},
          {"direct_memory", direct_memory_report()},
          {"addresses", addresses}};
}

Json examine() {
  const std::string failure = two_rank_self_test();
  Json launch = launch_report();
  const bool ok = failure.empty() && !launch.contains("error");
  return {{"ok", ok},
          {"versions",
           {{"lockstep", LOCKSTEP_VERSION},
            {"libtorch", TORCH_VERSION},
            {"cuda", cuda_version()},
            {"nccl", or_absent(nccl_version())},
            {"gloo", "of libtorch " TORCH_VERSION},
            {"protobuf", protobuf_version()},
            {"fmt", fmt_version()}}},
          {"devices",
           {{"cpu_cores", std::thread::hardware_concurrency()}, {"cuda", cuda_device_count()}}},
          {"network", network_report()},
          {"launch", launch},
          {"self_test", failure.empty() ? "two ranks reduced 65536 elements over Gloo" : failure}};
}

void print_text(const Json& report) {
  for (const auto& [section, content] : report.items()) {
    if (!content.is_object()) {
      std::cout << section << ": "
                << (content.is_string() ? content.get<std::string>() : content.dump()) << "\n";
      continue;
    }
    std::cout << section << ":\n";
    for (const auto& [name, value] : content.items())
      std::cout << "  " << name << ": "
                << (value.is_string() ? value.get<std::string>() : value.dump()) << "\n";
  }
}

}  // namespace

void add_doctor_command(CLI::App& program) {
  auto json = std::make_shared<bool>(false);
  CLI::App* const command = program.add_subcommand(
      "doctor",
      "Report versions, devices and network, and run a self-test of two ranks; the exit status is "
      "0 if a job could start");
  command->add_flag("--json", *json, "Print one JSON document");
  command->callback([json] {
    const Json report = examine();
    if (*json)
      std::cout << report.dump(2) << "\n";
    else
      print_text(report);
    if (!report["ok"].get<bool>()) throw ExitStatus{1, ""};
  });
}

}  // namespace lockstep
