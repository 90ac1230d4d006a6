// Measures one GPU: see gpu_bench.h. Each command prints JSON.

#include "lockstep/benchmarks/gpu_bench.h"

#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <vector>

#include <ATen/Context.h>

#include "lockstep/core/config_io.h"
#include "lockstep/core/error.h"

namespace lockstep::benchmarks {
namespace {

struct Arguments {
  std::string device = "cuda";
  std::string attention;
  bool small = false;
  std::string config;
  std::vector<std::string> overrides;

  Config load() const { return load_config(config, overrides); }
};

/// Restricts libtorch to this attention kernel.
void choose_attention(const std::string& name) {
  if (name.empty()) return;
  at::Context& context = at::globalContext();
  context.setSDPUseCuDNN(name == "cudnn");
  context.setSDPUseFlash(name == "flash");
  context.setSDPUseMemEfficient(name == "efficient");
  context.setSDPUseMath(name == "math");
}

c10::Device device_of(const Arguments& arguments) {
  if (arguments.device == "cpu") return c10::kCPU;
  if (at::globalContext().hasCUDA()) return {c10::kCUDA, 0};
  throw ConfigError("no CUDA device");
}

void print(const Json& result) { std::printf("%s\n", result.dump().c_str()); }

void add_options(CLI::App& program, Arguments& arguments) {
  program.add_option("--device", arguments.device, "cuda or cpu")
      ->check(CLI::IsMember({"cuda", "cpu"}));
  program.add_option("--attention", arguments.attention, "The only kernel that attention may take")
      ->check(CLI::IsMember({"cudnn", "flash", "efficient", "math"}));
  program.add_flag("--small", arguments.small, "Sizes for a trial on the CPU");
  program.require_subcommand(1);
  program.add_subcommand("ceilings", "What copies and matrix products reach");
  program.add_subcommand("kernels", "Our kernels");
  program.add_subcommand("fused", "Fused operations against libtorch's operators");
  for (const char* name : {"steps", "profile"}) {
    CLI::App* const command = program.add_subcommand(name, "Training steps of a configuration");
    command->add_option("config", arguments.config)->required();
    command->add_option("--set", arguments.overrides, "path=value")->take_all();
  }
}

void run(const CLI::App& program, const Arguments& arguments) {
  const c10::Device device = device_of(arguments);
  choose_attention(arguments.attention);
  if (program.got_subcommand("ceilings")) print(measure_ceilings(device, arguments.small));
  if (program.got_subcommand("kernels")) print(measure_kernels(device, arguments.small));
  if (program.got_subcommand("fused")) print(measure_fused(device, arguments.small));
  if (program.got_subcommand("steps")) serve_steps(arguments.load(), device);
  if (program.got_subcommand("profile")) print(profile_steps(arguments.load(), device));
}

}  // namespace
}  // namespace lockstep::benchmarks

int main(int argc, char** argv) {
  CLI::App program("Measures one GPU.", "gpu_bench");
  lockstep::benchmarks::Arguments arguments;
  lockstep::benchmarks::add_options(program, arguments);
  CLI11_PARSE(program, argc, argv);
  try {
    lockstep::benchmarks::run(program, arguments);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "gpu_bench: %s\n", error.what());
    return 1;
  }
}
