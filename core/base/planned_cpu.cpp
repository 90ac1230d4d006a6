#include "lockstep/core/planned_cpu.h"

#include <atomic>
#include <utility>

namespace lockstep {
namespace {

enum class Planned { nothing, cpu, gpu };

std::atomic<Planned> planned = Planned::nothing;
thread_local bool on_planned_host = false;

}  // namespace

bool plans_cpu() { return planned == Planned::cpu; }

bool plans_gpu() { return planned == Planned::gpu; }

PlansCpu::PlansCpu(bool yes) { planned = yes ? Planned::cpu : Planned::gpu; }

PlansCpu::~PlansCpu() { planned = Planned::nothing; }

OnPlannedHost::OnPlannedHost(bool yes)
    : before_(std::exchange(on_planned_host, on_planned_host || yes)) {}

OnPlannedHost::~OnPlannedHost() { on_planned_host = before_; }

bool OnPlannedHost::is_active() { return on_planned_host; }

}  // namespace lockstep
