#include "lockstep/core/planned_cpu.h"

#include <atomic>

namespace lockstep {
namespace {

std::atomic<bool> planned = false;

}  // namespace

bool plans_cpu() { return planned; }

PlansCpu::PlansCpu(bool yes) { planned = yes; }

PlansCpu::~PlansCpu() { planned = false; }

}  // namespace lockstep
