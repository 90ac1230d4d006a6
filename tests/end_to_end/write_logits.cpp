// Writes what models compute from the first windows of a text, for the tests that compare with
// Hugging Face: logits [2, LENGTH, vocabulary] in fp32. If FILE ends in .safetensors, it writes the
// gradients of the mean loss, with transformers' names and shapes of the weights, and registered
// buffers as they are.
// Usage: write_logits TEXT LENGTH (CHECKPOINT FILE)...

#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>

#include <ATen/ATen.h>

#include "lockstep/checkpoint/hugging_face_weights.h"
#include "lockstep/checkpoint/safetensors.h"
#include "lockstep/checkpoint/saved_model.h"

namespace {

void write_logits(const lockstep::GPTModel& model, const at::Tensor& tokens,
                  const std::string& file) {
  const at::NoGradGuard no_grad;
  const at::Tensor logits = model.forward(tokens).to(at::kFloat).contiguous();
  std::ofstream(file, std::ios::binary)
      .write(static_cast<const char*>(logits.const_data_ptr()),
             static_cast<std::streamsize>(logits.nbytes()));
}

void write_gradients(const lockstep::GPTModel& model, const at::Tensor& tokens,
                     const at::Tensor& labels, const std::string& file) {
  model.forward(tokens, labels).mean().backward();
  lockstep::NamedTensors gradients;
  for (const lockstep::NamedParameter& param : lockstep::collect_parameters(model)) {
    const auto& rows = param.description.unpadded_rows;
    const at::Tensor gradient = param.tensor.grad();
    gradients[param.name] = rows ? gradient.narrow(0, 0, *rows) : gradient;
  }
  for (const auto& buffer : model.named_buffers()) gradients[buffer.key()] = buffer.value();
  const lockstep::NamedTensors theirs = lockstep::to_hugging_face(model.config(), gradients);
  lockstep::save_safetensors(file, {theirs.begin(), theirs.end()});
}

void run(const std::vector<std::string>& arguments) {
  constexpr int64_t kWindows = 2;
  std::ifstream file(arguments.at(0), std::ios::binary);
  const std::vector<unsigned char> text((std::istreambuf_iterator<char>(file)), {});
  const int64_t length = std::atoll(arguments.at(1).c_str());
  const at::Tensor bytes = at::tensor(at::ArrayRef<unsigned char>(text), at::kByte).to(at::kLong);
  const auto windows = [&](int64_t first) {
    return bytes.narrow(0, first, kWindows * length).view({kWindows, length});
  };
  for (size_t i = 2; i + 1 < arguments.size(); i += 2) {
    const lockstep::SavedModel saved = lockstep::load_model(arguments[i], c10::kCPU);
    if (arguments[i + 1].ends_with(".safetensors"))
      write_gradients(*saved.model, windows(0), windows(1), arguments[i + 1]);
    else
      write_logits(*saved.model, windows(0), arguments[i + 1]);
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
