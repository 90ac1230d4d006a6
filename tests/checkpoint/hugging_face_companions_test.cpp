// What belongs to a model in Hugging Face's folders besides its weights: its tokenizer and the ends
// of its texts.

#include <gtest/gtest.h>

#include <filesystem>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "lockstep/checkpoint/companion_files.h"
#include "lockstep/core/check.h"
#include "lockstep/datasets/tokenizer.h"
#include "lockstep/tests/checkpoint/exported_model.h"

namespace lockstep {
namespace {

using testing::kGpt2;
using testing::kLlama;

/// GPT-2's vocab.json with one token per byte.
std::string vocabulary_of_bytes() {
  nlohmann::json json;
  int next = 256;
  for (int byte = 0; byte < 256; ++byte) {
    const bool itself = (byte > 32 && byte < 127) || (byte > 160 && byte != 173);
    const int character = itself ? byte : next++;
    json[character < 128 ? std::string(1, static_cast<char>(character))
                         : std::string{static_cast<char>(0xc0 | character >> 6),
                                       static_cast<char>(0x80 | (character & 0x3f))}] = byte;
  }
  return json.dump();
}

/// A tokenizer.json of all bytes and the tokens of `added`, from id 256 on.
std::string tokenizer_of_bytes(const std::vector<std::string>& added) {
  nlohmann::json json = {{"model", {{"type", "BPE"}, {"byte_fallback", true}}}};
  json["model"]["merges"] = nlohmann::json::array();
  for (int byte = 0; byte < 256; ++byte)
    json["model"]["vocab"][fmt::format("<0x{:02X}>", byte)] = byte;
  for (const std::string& content : added)
    json["added_tokens"].push_back({{"id", 256 + json["added_tokens"].size()},
                                    {"content", content},
                                    {"special", true},
                                    {"normalized", false},
                                    {"single_word", false},
                                    {"lstrip", false},
                                    {"rstrip", false}});
  return json.dump();
}

class HuggingFaceCompanions : public testing::ExportedModel {
 protected:
  nlohmann::json json_at(const std::string& name) const {
    return nlohmann::json::parse(folder_.read(name));
  }

  /// Saves the model with this tokenizer. Returns what its export tells.
  std::string export_with(const std::string& tokenizer, const std::string& name) {
    config_.data.tokenizer = tokenizer;
    save_model(ours_, 1, config_, GPTModel(config_.model));
    return export_to_hugging_face(ours_, folder_.path() / name);
  }
};

TEST_F(HuggingFaceCompanions, BringTheTokenizerAlong) {
  save(kGpt2);
  const std::string out = export_as("out", {});
  EXPECT_EQ(nlohmann::json::parse(folder_.read("out/generation_config.json")),
            nlohmann::json({{"_from_model_config", true}}));
  folder_.write("out/vocab.json", vocabulary_of_bytes());
  folder_.write("out/merges.txt", "#version: 0.2\n");
  folder_.write("out/generation_config.json", "{\"temperature\": 0.6}");
  const std::string back = folder_.path() / "back";
  EXPECT_EQ(import_from_hugging_face(out, back).note, "");
  EXPECT_EQ(load_model(back, c10::kCPU).config.data.tokenizer, "gpt2:" + back + "/hugging_face");
  std::filesystem::remove_all(out);
  EXPECT_EQ(export_to_hugging_face(back, folder_.path() / "again"), "");
  for (const char* const name : {"vocab.json", "merges.txt", "generation_config.json"})
    EXPECT_EQ(folder_.read(std::string("again/") + name),
              folder_.read(std::string("back/hugging_face/") + name))
        << name;
  EXPECT_EQ(folder_.read("again/generation_config.json"), "{\"temperature\": 0.6}");
  std::filesystem::remove_all(back + "/hugging_face");
  EXPECT_NE(export_to_hugging_face(back, folder_.path() / "without")
                .find("the tokenizer 'gpt2:" + back + "/hugging_face' is left out: "),
            std::string::npos);
}

TEST_F(HuggingFaceCompanions, DoNotTakeTiktokensRanksAlongAndSaySo) {
  constexpr const char* kBase64 =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string ranks;  // of one token per byte
  for (int byte = 0; byte < 256; ++byte)
    ranks += std::string{kBase64[byte >> 2], kBase64[(byte & 3) << 4]} +
             "== " + std::to_string(byte) + "\n";
  const std::string tokenizer = "gpt2:" + folder_.path().string();
  folder_.write("r50k_base.tiktoken", ranks);
  save(kGpt2);
  config_.data.tokenizer = tokenizer;
  save_model(ours_, 1, config_, GPTModel(config_.model));
  EXPECT_EQ(export_to_hugging_face(ours_, folder_.path() / "out", {}),
            "the tokenizer '" + tokenizer +
                "' is left out: it consists of tiktoken's ranks, allowed: vocab.json and "
                "merges.txt, or encoder.json and vocab.bpe");
  folder_.write("vocab.json", vocabulary_of_bytes());
  folder_.write("merges.txt", "#version: 0.2\n");
  EXPECT_EQ(export_to_hugging_face(ours_, folder_.path() / "complete", {}), "");
}

TEST_F(HuggingFaceCompanions, AFailedImportLeavesTheTokenizerOfTheOneBefore) {
  save(kGpt2);
  const std::string out = export_as("out", {}), back = folder_.path() / "back";
  folder_.write("out/vocab.json", vocabulary_of_bytes());
  folder_.write("out/merges.txt", "#version: 0.2\n");
  folder_.write("out/generation_config.json", "first");
  import_from_hugging_face(out, back);
  folder_.write("out/generation_config.json", "second");
  std::filesystem::remove(out + "/vocab.json");
  const Tensors whole = load_all(out);
  std::vector<std::pair<std::string, at::Tensor>> tensors(whole.begin(), whole.end());
  const at::Tensor good = tensors.back().second;
  tensors.back().second = at::full_like(good, std::numeric_limits<double>::quiet_NaN());
  save_safetensors(out + "/model.safetensors", tensors);
  EXPECT_TRUE(refuses(out, "not finite"));
  EXPECT_EQ(folder_.read("back/hugging_face/generation_config.json"), "first");
  EXPECT_EQ(folder_.read("back/hugging_face/vocab.json"), vocabulary_of_bytes());
  EXPECT_FALSE(std::filesystem::exists(back + "/step_0.partial"));
  tensors.back().second = good;
  save_safetensors(out + "/model.safetensors", tensors);
  import_from_hugging_face(out, back);
  EXPECT_EQ(folder_.read("back/hugging_face/generation_config.json"), "second");
  EXPECT_FALSE(std::filesystem::exists(back + "/hugging_face/vocab.json"));
  EXPECT_FALSE(std::filesystem::exists(back + "/step_0/companions"));
}

TEST_F(HuggingFaceCompanions, AnImportThatCannotBecomeCompleteLeavesTheTokenizerOfTheOneBefore) {
  save(kGpt2);
  const std::string out = export_as("out", {}), back = folder_.path() / "back";
  const auto kept = [&] {
    std::map<std::string, std::string> files;
    for (const auto& entry : std::filesystem::directory_iterator(back + "/hugging_face"))
      files[entry.path().filename()] =
          folder_.read("back/hugging_face/" + entry.path().filename().string());
    return files;
  };
  folder_.write("out/vocab.json", vocabulary_of_bytes());
  folder_.write("out/merges.txt", "#version: 0.2\n");
  folder_.write("out/generation_config.json", "first");
  import_from_hugging_face(out, back);
  folder_.write("back/hugging_face/notes", "a person's");
  const auto before = kept();
  EXPECT_EQ(before.size(), 4u);
  folder_.write("out/generation_config.json", "second");
  folder_.write("out/special_tokens_map.json", "only in the second");
  std::filesystem::remove(out + "/vocab.json");
  std::filesystem::remove(back + "/latest");
  std::filesystem::create_directory(back + "/latest");
  EXPECT_TRUE(refuses(out, "/latest': found no regular file"));
  EXPECT_EQ(kept(), before);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(back), {}), 3);
  std::filesystem::remove(back + "/latest");
  EXPECT_EQ(load_model(back, c10::kCPU).config.data.tokenizer, "gpt2:" + back + "/hugging_face");
  import_from_hugging_face(out, back);
  EXPECT_EQ(kept(), (std::map<std::string, std::string>{
                        {"generation_config.json", "second"},
                        {"merges.txt", "#version: 0.2\n"},
                        {"notes", "a person's"},
                        {"special_tokens_map.json", "only in the second"}}));
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(back), {}), 3);
}

TEST_F(HuggingFaceCompanions, ATokenizerThatCannotBeReadIsToldOf) {
  save(kGpt2);
  const std::string out = export_as("out", {});
  folder_.write("out/vocab.json", "{}");
  folder_.write("out/merges.txt", "damaged");
  const ImportedModel model = import_from_hugging_face(out, folder_.path() / "back");
  EXPECT_EQ(model.note.find("data.tokenizer is byte: '" + out + "/"), 0u) << model.note;
  EXPECT_EQ(load_model(folder_.path() / "back", c10::kCPU).config.data.tokenizer, "byte");
  // Its files come along nevertheless.
  export_to_hugging_face(folder_.path() / "back", folder_.path() / "again");
  EXPECT_EQ(folder_.read("again/merges.txt"), "damaged");
  save(kLlama);
  const std::string llama = export_as("llama", {});
  folder_.write("llama/vocab.json", vocabulary_of_bytes());
  folder_.write("llama/merges.txt", "#version: 0.2\n");
  EXPECT_EQ(import_from_hugging_face(llama, folder_.path() / "llama back").note,
            "data.tokenizer is byte: '" + llama +
                "': found vocab.json and merges.txt, allowed for another model than GPT-2: "
                "tokenizer.json or tokenizer.model");
}

TEST_F(HuggingFaceCompanions, NameAnEndOfTextThatTheModelHas) {
  const auto generation = [&](const std::string& name) {
    return nlohmann::json::parse(folder_.read(name + "/generation_config.json"));
  };
  for (const auto& [size, has_end] : {std::pair(257, true), {320, false}, {256, false}}) {
    save(kLlama);
    config_.model.vocab_size = size;
    save_model(ours_, 1, config_, GPTModel(config_.model));
    export_as("out", {});
    EXPECT_EQ(generation("out").contains("eos_token_id"), has_end) << size;
  }
  // Without a generation_config.json, those of config.json count.
  std::filesystem::remove(folder_.path() / "out/generation_config.json");
  auto json = nlohmann::json::parse(folder_.read("out/config.json"));
  json.update({{"bos_token_id", 1}, {"eos_token_id", {2, 7}}});
  folder_.write("out/config.json", json.dump());
  import_from_hugging_face(folder_.path() / "out", folder_.path() / "back");
  export_to_hugging_face(folder_.path() / "back", folder_.path() / "again");
  EXPECT_EQ(generation("again"),
            nlohmann::json(
                {{"_from_model_config", true}, {"bos_token_id", 1}, {"eos_token_id", {2, 7}}}));
}

// See tests/end_to_end/exported_tokenizers_test.py for what transformers makes of them.
TEST_F(HuggingFaceCompanions, LetTransformersFollowTheTokenizer) {
  save(kLlama);
  auto vocabulary = nlohmann::json::parse(vocabulary_of_bytes());
  vocabulary.update({{"<|endoftext|>", 256}, {"Al", 257}, {"\u0120Al", 258}});
  std::filesystem::create_directory(folder_.path() / "gpt2");
  folder_.write("gpt2/encoder.json", vocabulary.dump());
  folder_.write("gpt2/vocab.bpe", "#version: 0.2\nA l\n\u0120 Al\n");
  const std::string gpt2 = "gpt2:" + (folder_.path() / "gpt2").string();
  EXPECT_EQ(export_with(gpt2, "out"), "");
  const nlohmann::json chosen = {{"tokenizer_class", "PreTrainedTokenizerFast"},
                                 {"clean_up_tokenization_spaces", false},
                                 {"eos_token", "<|endoftext|>"}};
  EXPECT_EQ(json_at("out/tokenizer_config.json"), chosen);
  const auto ours = make_tokenizer(gpt2, "ours");
  const auto theirs =
      make_tokenizer("hf:" + (folder_.path() / "out/tokenizer.json").string(), "it");
  const std::string text = "Al's 12  Alphas, Al\n caf\u00e9\u00a0";
  EXPECT_EQ(theirs->encode(text), ours->encode(text));
  EXPECT_EQ(theirs->encode(text).front(), 257);
  EXPECT_EQ(theirs->end_of_document(), 256);
  // A configuration is completed, unless it chooses a class.
  folder_.write("gpt2/tokenizer_config.json", R"({"eos_token": "x", "model_max_length": 4})");
  EXPECT_EQ(export_with(gpt2, "out"), "");
  nlohmann::json completed = chosen;
  completed.update({{"eos_token", "x"}, {"model_max_length", 4}});
  EXPECT_EQ(json_at("out/tokenizer_config.json"), completed);
  const std::string own = R"({"tokenizer_class": "GPT2Tokenizer"})";
  folder_.write("gpt2/tokenizer_config.json", own);
  EXPECT_EQ(export_with(gpt2, "out"), "");
  EXPECT_EQ(folder_.read("out/tokenizer_config.json"), own);
  EXPECT_FALSE(std::filesystem::exists(folder_.path() / "out/tokenizer.json"));
  folder_.write("gpt2/tokenizer_config.json", "[]");
  EXPECT_NE(export_with(gpt2, "out")
                .find("is left out: '" + folder_.path().string() +
                      "/gpt2/tokenizer_config.json': found []"),
            std::string::npos);
}

TEST_F(HuggingFaceCompanions, OfQwen2AreReadByItsOwnClassAndThatIsTold) {
  save("add_qkv_bias: true num_attention_heads: 4");
  folder_.write("tokenizer.json", tokenizer_of_bytes({"</s>"}));
  const std::string tokenizer = "hf:" + (folder_.path() / "tokenizer.json").string();
  const std::string note = "the tokenizer '" + tokenizer +
                           "': AutoTokenizer of transformers takes a Qwen2Tokenizer for every "
                           "qwen2 model, which may give other ids; "
                           "PreTrainedTokenizerFast.from_pretrained() gives these";
  EXPECT_EQ(export_with(tokenizer, "out"), note);
  EXPECT_EQ(json_at("out/tokenizer_config.json")["eos_token"], "</s>");
  folder_.write("tokenizer_config.json", R"({"tokenizer_class": "PreTrainedTokenizerFast"})");
  EXPECT_EQ(export_with(tokenizer, "out"), note);
  folder_.write("tokenizer_config.json", R"({"tokenizer_class": "Qwen2TokenizerFast"})");
  EXPECT_EQ(export_with(tokenizer, "out"), "");
}

TEST_F(HuggingFaceCompanions, EndATextWhereTheAssistantsMessagesOfItsTrainingEnd) {
  save(kLlama);
  config_.model.vocab_size = 260;
  config_.train.task = TrainTask::sft;
  folder_.write("tokenizer.json",
                tokenizer_of_bytes({"<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|eot_id|>"}));
  const std::string tokenizer = "hf:" + (folder_.path() / "tokenizer.json").string();
  using Ends = std::set<int64_t>;
  const auto ends = [&] { return ends_of_text(config_, *make_tokenizer(tokenizer, "it")); };
  const auto exported = [&] {
    EXPECT_EQ(export_with(tokenizer, "out"), "");
    return json_at("out/generation_config.json")["eos_token_id"];
  };
  EXPECT_EQ(exported(), (nlohmann::json{256, 258}));
  EXPECT_EQ(ends(), (Ends{256, 258}));
  config_.data.chat_template = ChatTemplate::llama3;
  EXPECT_EQ(ends(), (Ends{256, 259}));
  config_.data.chat_template = ChatTemplate::plain;
  EXPECT_EQ(ends(), Ends{256});
  EXPECT_EQ(exported(), 256);
  config_.data.chat_template = ChatTemplate::chatml;
  for (const auto& [kept, expected] : {std::pair<std::string, nlohmann::json>("3", {3, 258}),
                                       {"[3, 258]", {3, 258}},
                                       {"258", 258},
                                       {"null", {256, 258}}}) {
    folder_.write("generation_config.json", R"({"top_p": 0.5, "eos_token_id": )" + kept + "}");
    EXPECT_EQ(exported(), expected) << kept;
    EXPECT_EQ(json_at("out/generation_config.json")["top_p"], 0.5);
    EXPECT_TRUE(ends().contains(258));
  }
  config_.train.task = TrainTask::pretrain;
  EXPECT_EQ(ends(), Ends{256});
  export_with(tokenizer, "out");
  EXPECT_EQ(folder_.read("out/generation_config.json"), folder_.read("generation_config.json"));
}

TEST_F(HuggingFaceCompanions, TellOfAddedTokensThatVocabAndMergesLack) {
  save(kGpt2);
  const std::string out = export_as("out", {});
  folder_.write("out/vocab.json", vocabulary_of_bytes());
  folder_.write("out/merges.txt", "#version: 0.2\n");
  const auto note = [&](const std::string& added) {
    folder_.write("out/added_tokens.json", added);
    return import_from_hugging_face(out, folder_.path() / "back").note;
  };
  EXPECT_EQ(note(R"({"known": 255})"), "");
  EXPECT_EQ(note(R"({"<|im_end|>": 256})"),
            "data.tokenizer is gpt2: '" + out +
                "/added_tokens.json': found 1 token that vocab.json lacks, such as '<|im_end|>'; "
                "texts with them need a tokenizer.json");
}

TEST_F(HuggingFaceCompanions, LeaveNoTokenizerOfAnEarlierExport) {
  save(kLlama);
  const std::string out = export_as("out", {});
  for (const char* const name : {"chat_template.jinja", "notes"})
    folder_.write(std::string("out/") + name, "{}");
  export_as("out", {});
  EXPECT_FALSE(std::filesystem::exists(out + "/chat_template.jinja"));
  EXPECT_TRUE(std::filesystem::exists(out + "/notes"));
}

}  // namespace
}  // namespace lockstep
