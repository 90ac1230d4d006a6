#include "lockstep/training/recorded_work.h"

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "lockstep/core/upload.h"
#include "lockstep/models/context_parallel.h"

namespace lockstep {
namespace {

void wait_for(c10::Device device) {
  c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
}

/// Ends a capture that failed; the error to report is the one that made it fail.
void give_up(kernels::DeviceGraph& graph) {
  try {
    graph.end_capture();
  } catch (const std::exception&) {
  }
}

}  // namespace

RecordedWork::RecordedWork(const ParallelState& parallel_state) : parallel_state_(parallel_state) {}

RecordedWork::~RecordedWork() {
  try {
    if (graph_) wait_for(parallel_state_.device());
  } catch (const std::exception&) {
    // A device that has failed does no more work.
  }
}

void RecordedWork::record(const std::function<void()>& body) {
  const c10::Device device = parallel_state_.device();
  wait_for(device);
  graph_.reset();
  auto graph = kernels::make_device_graph(device.type());
  const CallRecorder recorder(parallel_state_.world());
  graph->begin_capture();
  try {
    body();
  } catch (...) {
    give_up(*graph);
    throw;
  }
  graph->end_capture();
  graph_ = std::move(graph);
  calls_ = recorder.calls();
}

void RecordedWork::launch() const {
  note_launch(calls_);
  graph_->replay();
  watch_launch(calls_, parallel_state_.device());
}

StaticInput::StaticInput(const GPTInput& like, const ParallelState& parallel_state)
    : input_({.tokens = at::empty_like(like.tokens), .labels = at::empty_like(like.labels)}) {
  const ProcessGroup context = parallel_state.group(GroupKind::cp);
  const c10::Device device = like.tokens.device();
  if (context.size() > 1)
    input_.positions.positions = upload(context_positions(like.tokens.size(1), context), device);
  const at::Tensor& places = like.positions.document_positions;
  if (places.defined()) input_.positions.document_positions = at::empty_like(places);
  input_.positions.first_sample_on_device = at::empty({}, like.tokens.options());
}

void StaticInput::assign(const GPTInput& from) {
  input_.tokens.copy_(from.tokens);
  input_.labels.copy_(from.labels);
  if (input_.positions.document_positions.defined())
    input_.positions.document_positions.copy_(from.positions.document_positions);
  input_.positions.first_sample_on_device.fill_(from.positions.first_sample);
}

}  // namespace lockstep
