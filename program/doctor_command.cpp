#include <chrono>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include <ATen/Context.h>
#include <torch/version.h>

#include "lockstep/core/cuda_libraries.h"
#include "lockstep/core/error.h"
#include "lockstep/core/usable_cores.h"
#include "lockstep/core/versions.h"
#include "lockstep/datasets/unfinished_file.h"
#include "lockstep/parallel_state/cpu_traits.h"
#include "lockstep/parallel_state/devices.h"
#include "lockstep/parallel_state/job_secret.h"
#include "lockstep/parallel_state/launch_environment.h"
#include "lockstep/parallel_state/network.h"
#include "lockstep/parallel_state/parallel_state.h"
#include "lockstep/parallel_state/self_test.h"
#include "lockstep/planner/machine.h"
#include "lockstep/program/argument_checks.h"
#include "lockstep/program/commands.h"
#include "lockstep/program/output_file.h"
#include "lockstep/program/rank_failure.h"
#include "lockstep/training/calibration.h"

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
    read_job_secret();
    return {{"launcher", to_string(environment.launcher)},
            {"rank", environment.rank},
            {"world_size", environment.world_size},
            {"master_address", environment.master_address},
            {"master_port", environment.master_port},
            {"secret", job_secret_source(environment_of_process())}};
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

/// The devices, with the reason why there is no CUDA device.
Json devices_report(const std::string& absence) {
  Json devices = {{"cpu_cores", usable_cores()}, {"cuda", cuda_device_count()}};
  if (!absence.empty()) devices["no_cuda"] = absence;
  return devices;
}

Json examine() {
  const std::string absence = why_no_cuda();
  (void)load_cuda_libraries();  // for their versions, even without a driver
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
          {"devices", devices_report(absence)},
          {"network", network_report()},
          {"launch", launch},
          {"self_test", failure.empty() ? "two ranks reduced 65536 elements over Gloo" : failure}};
}

/// Bytes that are not UTF-8, as an environment may have, are replaced.
std::string text_of(const Json& json, int indent = -1) {
  return json.dump(indent, ' ', false, Json::error_handler_t::replace);
}

void print_text(const Json& report) {
  for (const auto& [section, content] : report.items()) {
    if (!content.is_object()) {
      std::cout << section << ": "
                << (content.is_string() ? content.get<std::string>() : text_of(content)) << "\n";
      continue;
    }
    std::cout << section << ":\n";
    for (const auto& [name, value] : content.items())
      std::cout << "  " << name << ": "
                << (value.is_string() ? value.get<std::string>() : text_of(value)) << "\n";
  }
}

struct DoctorArguments {
  std::string machine_path;
  int64_t ranks = 0;
  bool json = false;
};

/// Two by default where several cores may be used: collectives are measured with two.
int64_t num_ranks(const DoctorArguments& arguments) {
  return arguments.ranks > 0 ? arguments.ranks : usable_cores() > 1 ? 2 : 1;
}

/// Measures this host and, as one of the two ranks of `hosts`, the link to the other one. Rank 0
/// writes the file.
void write_calibration(const DoctorArguments& arguments, const ParallelState* hosts) {
  const bool writes = !hosts || hosts->rank() == 0;
  if (writes) {
    check_apart_from_output("--calibrate", arguments.machine_path);
    check_output_file(arguments.machine_path);
  }
  keep_freed_memory();
  CalibrationOptions options;
  options.ranks = num_ranks(arguments);
  options.hosts = hosts;
  std::string last;
  if (writes)
    options.progress = [&last](const std::string& part) {
      if (part != last) std::cerr << "measuring " << part << "\n";
      last = part;
    };
  const auto begin = std::chrono::steady_clock::now();
  const Machine machine = calibrate(options);
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  if (!writes) return;
  write_output_file(arguments.machine_path,
                    "# Written by lockstep doctor --calibrate.\n" + machine_text(machine));
  if (arguments.json)
    std::cout << text_of({{"machine", arguments.machine_path},
                          {"name", machine.name},
                          {"seconds", seconds}})
              << "\n";
  else
    std::cout << fmt::format("{}: {}, measured in {:.0f} s\n", arguments.machine_path, machine.name,
                             seconds);
}

void write_calibration_as_rank(const DoctorArguments& arguments,
                               const LaunchEnvironment& environment) {
  std::optional<ParallelState> state;
  try {
    require<ConfigError>(environment.world_size == 2 && environment.local_world_size == 1,
                         "doctor --calibrate: found {} ranks, {} of them on this host, allowed: "
                         "one process, or two ranks on two hosts",
                         environment.world_size, environment.local_world_size);
    prepare_rank_threads();  // for the two ranks that measure the inside of this host
    ParallelStateOptions options;
    options.sizes.world_size = environment.world_size;
    options.announcement = {{"--ranks", std::to_string(num_ranks(arguments))}};
    state.emplace(environment, std::move(options));
    write_calibration(arguments, &*state);
  } catch (const std::exception& error) {
    if (state) state->post_failure(error.what());
    throw failure_of_rank(environment.rank, error);
  }
}

void write_calibration(const DoctorArguments& arguments) {
  const LaunchEnvironment environment = read_launch_environment();
  if (environment.world_size > 1) return write_calibration_as_rank(arguments, environment);
  write_calibration(arguments, nullptr);
}

constexpr const char* kDoctorFooter =
    "--calibrate measures this host for `lockstep plan time`: operators of training steps on all "
    "ranks at once, the host's time for each kernel, and collectives of two ranks. It takes about "
    "a minute, during which nothing else should run. It measures CPUs in fp32. Started by a "
    "launcher as one rank on each of two hosts that are alike, it also measures the link between "
    "them, which takes two or three minutes; rank 0 writes the file.\n"
    "JSON: ok, versions, devices (cpu_cores: usable cores, cuda: number of GPUs), network "
    "(interface and address that Gloo uses, and all addresses), launch (what the launcher's "
    "variables say), self_test. With --calibrate: machine (the file), name, seconds (that it "
    "took).";

}  // namespace

void add_doctor_command(CLI::App& program) {
  auto arguments = std::make_shared<DoctorArguments>();
  CLI::App* const command = program.add_subcommand(
      "doctor",
      "Report versions, devices and network, and run a self-test of two ranks; the exit status is "
      "0 if a job could start");
  command->add_flag("--json", arguments->json, "Print one JSON document");
  CLI::Option* const calibrate =
      command
          ->add_option("--calibrate", arguments->machine_path,
                       "Measure this host instead and write a machine file")
          ->type_name("FILE")
          ->check(check_path);
  command
      ->add_option("--ranks", arguments->ranks,
                   "Number of ranks among which the host's cores are divided; unset: 2, or 1 on a "
                   "single core. With two or more cores there may be more ranks than cores; they "
                   "then share them")
      ->needs(calibrate)
      ->check(check_at_least(1));
  command->footer(kDoctorFooter);
  command->callback([arguments] {
    if (!arguments->machine_path.empty()) return write_calibration(*arguments);
    const Json report = examine();
    if (arguments->json)
      std::cout << text_of(report, 2) << "\n";
    else
      print_text(report);
    if (!report["ok"].get<bool>()) throw ExitStatus{1, ""};
  });
}

}  // namespace lockstep
