#include "lockstep/parallel_state/recorded_calls.h"

#include <set>

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "lockstep/parallel_state/collective_call.h"

namespace lockstep {
namespace {

/// A launch on a stream, up to an event after it.
class LaunchPart final : public Pending {
 public:
  explicit LaunchPart(c10::Device device) : launched_(device.type()) {
    launched_.record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  }
  void wait(const Waiting& /*waiting*/) override {}
  bool is_completed() const override { return launched_.query(); }

 private:
  c10::Event launched_;
};

}  // namespace

CallRecorder::CallRecorder(const ProcessGroup& world)
    : world_(world.shared_state()), calls_(std::make_shared<RecordedCalls>()) {
  if (world_->watch) world_->watch->start_recording(calls_);
}

CallRecorder::~CallRecorder() {
  if (world_->watch) world_->watch->stop_recording();
}

void note_launch(const RecordedCalls& calls) {
  for (const RecordedCall& call : calls) {
    const ProcessGroup::State& group = *call.group;
    if (group.watch) group.watch->check();
    const CollectiveRecord& first = call.shown.front();
    enter_call(group, call.operation, first.label, call.numel, first.dtype);
    if (!group.observer) continue;
    for (const CollectiveRecord& record : call.shown) group.observer(record);
  }
}

void watch_launch(const RecordedCalls& calls, c10::Device device) {
  if (calls.empty()) return;
  const auto launched = std::make_shared<LaunchPart>(device);
  std::set<const ProcessGroup::State*> seen;
  for (auto call = calls.rbegin(); call != calls.rend(); ++call) {
    if (!call->group->watch || !seen.insert(call->group.get()).second) continue;
    auto operation = std::make_shared<Work::Operation>();
    operation->group = call->group;
    operation->called = call->operation;
    operation->label = call->group->communicator->ledger().share_label("a recorded step, up to ",
                                                                       call->shown.front().label);
    operation->on_device = true;
    operation->parts = {launched};
    call->group->watch->add(std::move(operation));
  }
}

}  // namespace lockstep
