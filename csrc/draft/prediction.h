// A text that the caller expects to get back, with edits, and where an answer is in it.
#pragma once
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace neap::draft {

// A prediction, and where it has each four tokens in a row. It does not change.
class PredictedText {
 public:
  explicit PredictedText(std::vector<int32_t> tokens);
  int64_t size() const { return (int64_t)tokens_.size(); }
  int32_t operator[](int64_t place) const { return tokens_[place]; }
  // The place behind an occurrence of the last `length` tokens of `tail` that is nearest to `place`, at most `reach`
  // away; of four tokens any.
  int64_t nearest(const int32_t* tail, int length, int64_t place, int64_t reach) const;

 private:
  bool has(int64_t start, const int32_t* tokens, int length) const;

  std::vector<int32_t> tokens_;
  std::vector<std::pair<uint64_t, int64_t>> places_;  // by key, ascending
};

// Where an answer is in a prediction. Copied to go on along drafts.
struct PredictionPlace {
  int32_t tail[4] = {};
  int num_tail = 0;
  int64_t place = 0;
  // Tokens before the place that were right in a row. An answer begins as the prediction does.
  int64_t run = 4;

  void follow(const PredictedText& text, int32_t token);
};

// How often the token at the place was right, by the length of the run.
class PredictionRecord {
 public:
  PredictionRecord();
  void append(const PredictedText& text, int32_t token);
  double probability(int64_t run) const;

  PredictionPlace at;
  int64_t num_right = 0;

 private:
  static constexpr int kBins = 6;
  double right_[kBins], all_[kBins];
};

}  // namespace neap::draft
