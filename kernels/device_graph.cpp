#include "lockstep/kernels/device_graph.h"

#include <array>
#include <utility>

#include "lockstep/core/check.h"

namespace lockstep::kernels {
namespace {

using GraphTable = std::array<MakeDeviceGraph, c10::COMPILE_TIME_MAX_DEVICE_TYPES>;

GraphTable& graph_table() {
  static GraphTable table = [] {
    GraphTable made;
    made[static_cast<size_t>(c10::DeviceType::CUDA)] = cuda_graphs();
    return made;
  }();
  return table;
}

}  // namespace

bool has_device_graphs(c10::DeviceType type) {
  return graph_table()[static_cast<size_t>(type)] != nullptr;
}

std::unique_ptr<DeviceGraph> make_device_graph(c10::DeviceType type) {
  require<UsageError>(has_device_graphs(type),
                      "make_device_graph: devices of type {} have no graphs; allowed: CUDA, in a "
                      "build with LOCKSTEP_CUDA",
                      c10::DeviceTypeName(type, /*lower_case=*/true));
  return graph_table()[static_cast<size_t>(type)]();
}

void register_device_graphs(c10::DeviceType type, MakeDeviceGraph make) {
  graph_table()[static_cast<size_t>(type)] = std::move(make);
}

}  // namespace lockstep::kernels
