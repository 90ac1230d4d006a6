// A user's test: prints the finding of the check for each mistake as a line of
// name | seconds | parameter | text, and then the report on a model without mistakes.

#include <chrono>
#include <cstdio>

#include "own_net.h"

int main() {
  for (const own_net::Case& of : own_net::mistakes()) {
    const auto begin = std::chrono::steady_clock::now();
    const auto report = own_net::check(of.mistake, {of.layout});
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    const auto& culprit = report.layouts.front().culprit;
    std::printf("%s | %.2f | %s | %s\n", of.name.c_str(), seconds.count(),
                culprit ? culprit->parameter.c_str() : "",
                culprit ? culprit->text.c_str() : "nothing found");
    const bool right = culprit && culprit->parameter == of.parameter &&
                       culprit->text.find(of.text) != std::string::npos;
    if (!right) return 1;
  }
  const auto good = own_net::check(own_net::Mistake::none, own_net::good_layouts());
  std::printf("%s", lockstep::testing::to_string(good).c_str());
  return good.ok() ? 0 : 1;
}
