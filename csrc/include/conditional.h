// Captured segments of a model composed into one graph whose deeper part runs only where a count on the device says so. No torch.
//
//   segments[0], then if *counts[0] > 0 { segments[1], then if *counts[1] > 0 { segments[2], ... } }
#pragma once
#include <cstdint>

namespace neap {

struct ComposedGraph;

// Of a step that failed: CUDA's code, and the call that gave it. `call` is null where all went well.
struct GraphError {
  int code;
  const char* call;
};

// `segments` [num_segments] are cudaGraph_t, which are copied; `counts` [num_segments - 1] addresses on the device, which segment i
// writes. What was made before a failure is destroyed again.
GraphError compose_graph(void* const* segments, const int64_t* const* counts, int num_segments, ComposedGraph** out);
GraphError launch_graph(const ComposedGraph* graph, void* stream);
// Everything is destroyed, also where a call fails; the first failure is returned.
GraphError destroy_graph(ComposedGraph* graph);
// The CUDA version of the driver: 12040 is 12.4.
GraphError driver_version(int* version);

}  // namespace neap
