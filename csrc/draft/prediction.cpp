#include "prediction.h"

#include <algorithm>
#include <cstdlib>

#include "hash.h"

namespace neap::draft {

namespace {

constexpr int kMostTail = 4;
// Where the prediction was wrong, it goes on behind the nearest place with the last tokens of the answer: so many of
// them, at most so many tokens away. More of them prove more.
struct Alignment {
  int length;
  int64_t reach;
};
constexpr Alignment kAlignments[] = {{kMostTail, INT64_MAX}, {2, 64}, {1, 16}};
// Right drafts of so many, before any is known, by the tokens in a row that were right: 0, 1, 2 to 3, 4 to 7, ...
constexpr double kPriors[] = {0.3, 0.6, 0.8, 0.9, 0.95, 0.97}, kPriorWeight = 4.0;

uint64_t key_of(const int32_t* tokens) {
  uint64_t key = 0;
  for (int i = kMostTail - 1; i >= 0; --i) key = extend_hash(key, tokens[i]);
  return key;
}

int bin_of(int64_t run) {
  int bin = 0;
  while (run > 0 && bin < 5) ++bin, run >>= 1;
  return bin;
}

}  // namespace

PredictedText::PredictedText(std::vector<int32_t> tokens) : tokens_(std::move(tokens)) {
  for (int64_t start = 0; start + kMostTail <= size(); ++start) places_.emplace_back(key_of(&tokens_[start]), start);
  std::sort(places_.begin(), places_.end());
}

bool PredictedText::has(int64_t start, const int32_t* tokens, int length) const {
  return std::equal(tokens, tokens + length, &tokens_[start]);
}

int64_t PredictedText::nearest(const int32_t* tail, int length, int64_t place, int64_t reach) const {
  int64_t ahead = -1, behind = -1;
  if (length == kMostTail) {
    const std::pair<uint64_t, int64_t> wanted{key_of(tail), place - length};
    const auto after = std::lower_bound(places_.begin(), places_.end(), wanted);
    if (after != places_.end() && after->first == wanted.first && has(after->second, tail, length))
      ahead = after->second + length;
    if (after != places_.begin()) {
      const auto& before = *std::prev(after);
      if (before.first == wanted.first && has(before.second, tail, length)) behind = before.second + length;
    }
  } else {
    // Ends are counted: from `place` on upwards, and below it downwards.
    for (int64_t end = std::max<int64_t>(place, length); end <= std::min(place + reach, size()) && ahead < 0; ++end)
      if (has(end - length, tail, length)) ahead = end;
    for (int64_t end = std::min(place - 1, size()); end >= std::max<int64_t>(place - reach, length) && behind < 0;
         --end)
      if (has(end - length, tail, length)) behind = end;
  }
  if (ahead < 0 || behind < 0) return std::max(ahead, behind);
  return ahead - place <= place - behind ? ahead : behind;
}

void PredictionPlace::follow(const PredictedText& text, int32_t token) {
  if (num_tail == kMostTail) std::copy(tail + 1, tail + kMostTail, tail);
  else ++num_tail;
  tail[num_tail - 1] = token;
  if (place < text.size() && text[place] == token) {
    ++place, ++run;
    return;
  }
  for (const Alignment& alignment : kAlignments) {
    if (num_tail < alignment.length) continue;
    const int64_t found = text.nearest(tail + num_tail - alignment.length, alignment.length, place, alignment.reach);
    if (found < 0) continue;
    place = found, run = alignment.length;
    return;
  }
  // The first wrong token may stand in the place of one, further ones are between two.
  if (run) ++place;
  run = 0;
}

PredictionRecord::PredictionRecord() {
  for (int bin = 0; bin < kBins; ++bin) right_[bin] = kPriorWeight * kPriors[bin], all_[bin] = kPriorWeight;
}

void PredictionRecord::append(const PredictedText& text, int32_t token) {
  if (at.place < text.size()) {
    const bool is_right = text[at.place] == token;
    num_right += is_right;
    right_[bin_of(at.run)] += is_right;
    all_[bin_of(at.run)] += 1.0;
  }
  at.follow(text, token);
}

double PredictionRecord::probability(int64_t run) const { return right_[bin_of(run)] / all_[bin_of(run)]; }

}  // namespace neap::draft
