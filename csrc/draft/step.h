// Drafts of one step: chains of all its sequences, grown place by place from what tables and exits say, and cut to what
// their verification is expected to pay for. No layer runs here. Where an exit is worth its price, the step stops and
// says whom to ask; it goes on with the drafts that the exit has made.
#pragma once
#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "confidence.h"
#include "planner.h"
#include "prediction.h"
#include "tables.h"

namespace neap::draft {

struct Exit {
  int64_t depth;
  double agreement;
  ExitCost cost;
  // How much longer than `cost` its calls take while serving.
  double slowness = 1.0;
};

// What drafts for the sequences of one version of a router. Arrays that it points to are the caller's.
struct Ladder : Tables {
  PassCosts costs;
  std::vector<Exit> exits;
};

// The head's output for a draft: of row `row` and place `place` of what call `call` of the step has returned.
struct OutputPlace { int32_t call = -1, row = 0, place = 0; };

// How far an exit is with a chain. One call of it may draft many positions.
struct Ahead {
  struct Drafted {
    int32_t token;
    double probability;
    OutputPlace output;
  };
  // The first tokens of the chain that the head has seen, and its output for the last of them.
  int64_t num_seen = 0;
  OutputPlace output;
  int32_t newest = -1;
  // All drafts of later positions. They hold as long as the chain takes them.
  std::deque<Drafted> drafts;
};

struct Chain {
  // An exit that was asked for a position: what that was expected to add to the probability of the best draft, and that
  // draft before, or -1.
  struct Question {
    int32_t proposer = -1;
    double expected = 0.0;
    int32_t before = -1;
  };
  struct Link {
    Draft draft;
    double probability;  // of the draft being right: see `Confidence`
    std::vector<Draft> proposals;
    Question asked;
  };
  std::vector<Link> links;
  // The last tokens before the chain, and the chain's.
  std::vector<int32_t> path;
  size_t num_before = 0;
  PredictionPlace predicted;
  double survival = 1.0;  // the probability that all drafts are right
  std::vector<Ahead> ahead;
  // What a constraint leaves no choice of, and what it begins after that; -1: nothing.
  std::deque<int32_t> forced;
  int32_t begun = -1;
  // All drafts of the next position.
  std::vector<Draft> proposals;
  std::optional<Draft> best;
  double best_probability = 0.0;
  Question asked;
  bool is_open = true;  // whether proposers have a say in it
  // Limits.
  int64_t room = 0, min_layers = 0;
  double least_survival = kMinSurvival;
  double keys_s = 0.0;    // what a draft takes to attend to the keys before it
  bool is_fixed = false;  // all drafts are verified, whether they pay or not
  bool is_going = false;
  bool has_failed = false;

  int64_t left() const { return room - (int64_t)links.size(); }
  bool wants_more() const { return left() > 0 && survival > least_survival; }
  void append(const Draft& draft, double probability);
};

// A proposer of the caller's: the token after a sequence and `count` drafts, or -1 for none, and its probability.
using Script = int32_t (*)(const int32_t* drafted, int64_t count, double* probability);

struct Sequence {
  const Ladder* ladder;
  Confidence* confidence;
  const LearnedNgrams* learned;
  uint64_t salt;
  const PredictedText* predicted;
  int64_t num_left_out;  // tokens of the prompt, which predictions do not count
  Script script;         // drafts under the name of prompt look-up; null without one
  PromptLookup lookup;
  PredictionRecord prediction;
  std::vector<int32_t> tail;
  int64_t num_passes = 0, num_accepted = 0;
  Chain chain;

  void append(const int32_t* tokens, int64_t count);
  // What a pass has shown: the full model's choices at the places of the chain, the first of them accepted drafts.
  void record(const int32_t* tokens, int64_t count);
  void begin(int64_t room, int64_t min_layers, bool is_fixed, double keys_s, const PassLoad& load);
  // Cuts the chain, and says what a constraint has for the places after it.
  void go_on(int64_t num_kept, const int32_t* forced, int64_t num_forced, int32_t begun);
  void look_up();
  void consider(const Draft& draft);
  bool extend();
  double tokens_per_pass() const;
};

struct Asked {
  Sequence* sequence;
  int32_t row;
  double gain, gain_s;  // of the first draft, in probability and in seconds
};

class Step {
 public:
  // The chains of the rows have begun.
  void begin(std::vector<Sequence*> rows, const PassLoad& load);
  // Returns how many chains are to be taken to exit `exit_index()`; 0: all chains are as long as they get.
  int64_t advance();
  const std::vector<Asked>& asked() const { return asked_; }
  int64_t exit_index() const { return exit_; }
  double least_survival(const Asked& one) const;
  // The drafts of the asked chains: [asked, width], of which `lengths` count.
  void give(const int64_t* tokens, const double* probabilities, const int64_t* lengths, int64_t width);
  // The sequences that would have shared the exit have failed with it. Returns their rows.
  std::vector<int32_t> drop();
  std::vector<int64_t> plan() const;
  const std::vector<Sequence*>& rows() const { return rows_; }

 private:
  bool begin_round();
  void ask(const std::vector<int32_t>& group);
  void take(const std::vector<int32_t>& group);

  std::vector<Sequence*> rows_;
  PassLoad load_;
  std::vector<std::vector<int32_t>> groups_;  // rows that go on, by ladder
  size_t group_ = 0;
  int64_t exit_ = 0;
  bool is_round_ = false, is_asked_ = false;
  std::vector<Asked> asked_;
  int32_t num_calls_ = 0;
};

}  // namespace neap::draft
