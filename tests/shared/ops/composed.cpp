// Composes segments on the fake CUDA, launches them once per line of counts, and destroys them: prints every call, what ran, and
// what is left. Arguments: how many segments, which call fails (0: none), then per launch the counts that the segments write.
#include "../../../csrc/cuda/conditional.cu"

int main(int argc, char** argv) {
  const int num_segments = std::atoi(argv[1]);
  fake::state().failing = std::atoi(argv[2]);
  std::vector<int64_t> counts(num_segments, -1), wanted(num_segments, 0);
  std::vector<FakeGraph> segments(num_segments);
  std::vector<void*> graphs;
  std::vector<const int64_t*> addresses;
  for (int i = 0; i < num_segments; ++i) {
    segments[i].segment = [&, i] { std::printf("ran %d\n", i), counts[i] = wanted[i]; };
    graphs.push_back(&segments[i]), addresses.push_back(&counts[i]);
  }
  const auto report = [](const neap::GraphError& error) {
    if (error.call) std::printf("error %d %s\n", error.code, error.call);
  };
  neap::ComposedGraph* graph = nullptr;
  report(neap::compose_graph(graphs.data(), addresses.data(), num_segments, &graph));
  segments.clear();  // CUDA holds copies
  if (graph) {
    for (int next = 3; next + num_segments - 1 <= argc; next += num_segments - 1) {
      for (int i = 0; i + 1 < num_segments; ++i) wanted[i] = std::atoll(argv[next + i]);
      report(neap::launch_graph(graph, reinterpret_cast<void*>(0x57)));
    }
    report(neap::destroy_graph(graph));
  }
  std::printf("left %d graphs %d executables\n", fake::state().graphs, fake::state().executables);
  return 0;
}
