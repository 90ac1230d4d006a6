// libexec/lockstep: the part of the `lockstep` program that needs libtorch. It knows all commands,
// so that `lockstep --help` lists them.

#include "lockstep/program/commands.h"
#include "lockstep/program/program.h"
#include "lockstep/program/standard_descriptors.h"

int main(int argc, char** argv) {
  lockstep::open_standard_descriptors();
  lockstep::allow_many_open_files();
  return lockstep::run_program(argc, argv, [](CLI::App& program) {
    lockstep::add_launch_command(program);
    lockstep::add_configs_command(program);
    CLI::App* const plan = lockstep::add_plan_command(program);
    lockstep::add_plan_verify_command(*plan);
    lockstep::add_plan_time_command(*plan);
    lockstep::add_plan_best_command(*plan);
    lockstep::add_plan_report(*plan);
    lockstep::add_data_command(program);
    lockstep::add_train_command(program);
    lockstep::add_checkpoint_conversions(*lockstep::add_checkpoint_command(program));
    lockstep::add_evaluate_command(program);
    lockstep::add_generate_command(program);
    lockstep::add_score_command(program);
    lockstep::add_doctor_command(program);
    lockstep::add_plot_command(program);
    lockstep::add_watch_command(program);
    lockstep::add_trace_command(program);
    lockstep::add_audit_command(program);
    lockstep::add_megatron_flags_command(program);
    lockstep::add_completion_command(program);
    lockstep::add_man_command(program);
  });
}
