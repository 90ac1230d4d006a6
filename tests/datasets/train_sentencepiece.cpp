// Trains a small SentencePiece model for the tests: TEXT MODEL-PREFIX [OPTIONS], which replace
// --vocab_size=90. It is a separate program because the library's symbols must not clash with those
// of the other protobuf.

#include <sentencepiece_trainer.h>

#include <cstdio>
#include <string>

int main(int argc, char** argv) {
  if (argc != 3 && argc != 4) return 2;
  const auto status = sentencepiece::SentencePieceTrainer::Train(
      "--input=" + std::string(argv[1]) + " --model_prefix=" + argv[2] + " " +
      (argc == 4 ? argv[3] : "--vocab_size=90") + " --hard_vocab_limit=false --minloglevel=2");
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
