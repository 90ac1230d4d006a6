// Runs a fuzz target without libFuzzer: on every file of a folder, and on mutations of them, the
// same in every run. Usage: TARGET FOLDER [MUTATIONS]

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "lockstep/tests/fuzz/fuzz.h"

namespace lockstep::fuzz {
namespace {

std::vector<std::string> read_folder(const std::string& folder) {
  std::vector<std::string> paths, contents;
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    paths.push_back(entry.path());
  std::sort(paths.begin(), paths.end());
  for (const std::string& path : paths) {
    std::ifstream file(path, std::ios::binary);
    contents.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  return contents;
}

class Mutator {
 public:
  explicit Mutator(const std::vector<std::string>& seeds) : seeds_(seeds) {}

  std::string next() {
    std::string text = seeds_[below(seeds_.size())];
    for (size_t n = below(4) + 1; n > 0; --n) change(text);
    return text;
  }

 private:
  size_t below(size_t bound) { return random_() % bound; }

  void overwrite(std::string& text, const void* bytes, size_t size) {
    if (text.size() < size) return;
    std::memcpy(text.data() + below(text.size() - size + 1), bytes, size);
  }

  void change(std::string& text) {
    constexpr std::array<int64_t, 12> kNumbers = {
        0,         1,         -1,        127,       255,     65535,
        INT32_MAX, INT32_MIN, INT64_MAX, INT64_MIN, 1 << 30, int64_t(1) << 40};
    const size_t place = text.empty() ? 0 : below(text.size());
    const int64_t number = kNumbers[below(kNumbers.size())];
    switch (below(8)) {
      case 0:
        if (!text.empty()) text[place] = static_cast<char>(text[place] ^ (1 << below(8)));
        return;
      case 1:
        if (!text.empty()) text[place] = static_cast<char>(below(256));
        return;
      case 2:
        text.resize(place);
        return;
      case 3:
        text.erase(place, below(16) + 1);
        return;
      case 4:
        text.insert(place, text.substr(below(text.size() + 1), below(32) + 1));
        return;
      case 5:
        overwrite(text, &number, size_t(1) << below(4));
        return;
      case 6:
        text.insert(place, std::to_string(number));
        return;
      default: {
        const std::string& other = seeds_[below(seeds_.size())];
        text = text.substr(0, place) + other.substr(below(other.size() + 1));
      }
    }
  }

  const std::vector<std::string>& seeds_;
  std::mt19937 random_{20261121};
};

void run(const std::string& text) {
  LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(text.data()), text.size());
}

}  // namespace
}  // namespace lockstep::fuzz

int main(int argc, char** argv) {
  using namespace lockstep::fuzz;
  if (argc < 2) return 2;
  const std::vector<std::string> seeds = read_folder(argv[1]);
  const long mutations = argc > 2 ? std::atol(argv[2]) : 0;
  if (seeds.empty()) return 2;
  for (const std::string& seed : seeds) run(seed);
  Mutator mutator(seeds);
  long i = 0;
  try {
    for (; i < mutations; ++i) run(mutator.next());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "mutation %ld: an error of another kind: %s\n", i, error.what());
    return 1;
  }
  std::printf("%zu files, %ld mutations\n", seeds.size(), mutations);
}
