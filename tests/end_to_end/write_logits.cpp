// Writes what models compute from the first windows of a text, for hugging_face_test.py: logits
// [2, LENGTH, vocabulary] in fp32. Usage: write_logits TEXT LENGTH (CHECKPOINT FILE)...

#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>

#include <ATen/ATen.h>

#include "lockstep/checkpoint/saved_model.h"

namespace {

void run(const std::vector<std::string>& arguments) {
  constexpr int64_t kWindows = 2;
  std::ifstream file(arguments.at(0), std::ios::binary);
  const std::vector<unsigned char> text((std::istreambuf_iterator<char>(file)), {});
  const int64_t length = std::atoll(arguments.at(1).c_str());
  const at::Tensor bytes = at::tensor(at::ArrayRef<unsigned char>(text), at::kByte).to(at::kLong);
  const at::Tensor tokens = bytes.narrow(0, 0, kWindows * length).view({kWindows, length});
  const at::NoGradGuard no_grad;
  for (size_t i = 2; i + 1 < arguments.size(); i += 2) {
    const lockstep::SavedModel saved = lockstep::load_model(arguments[i], c10::kCPU);
    const at::Tensor logits = saved.model->forward(tokens).to(at::kFloat).contiguous();
    std::ofstream(arguments[i + 1], std::ios::binary)
        .write(static_cast<const char*>(logits.const_data_ptr()),
               static_cast<std::streamsize>(logits.nbytes()));
  }
}

}  // namespace

int main(int argc, char** argv) {
  try {
    run({argv + 1, argv + argc});
    return 0;
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
