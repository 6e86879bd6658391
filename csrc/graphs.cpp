// Composed graphs as ops: see conditional.h. A graph is known by an integer, the address of what holds it.
#include "include/conditional.h"

#include "device.h"

namespace neap::binding {

namespace {

#if defined(NEAP_WITH_CUDA)

void check(const char* op, const GraphError& error) {
  NEAP_CHECK(error.call == nullptr, op, ": ", error.call ? error.call : "", " failed: ", cuda_error(error.code));
}

int64_t compose_graphs(std::vector<int64_t> segments, std::vector<int64_t> counts, int64_t device) {
  NEAP_CHECK(segments.size() >= 2 && counts.size() + 1 == segments.size(), "compose_graphs: ", segments.size(), " segments with ", counts.size(),
             " counts between them");
  std::vector<void*> graphs;
  std::vector<const int64_t*> addresses;
  for (int64_t segment : segments) graphs.push_back(reinterpret_cast<void*>(segment));
  for (int64_t count : counts) addresses.push_back(reinterpret_cast<const int64_t*>(count));
  torch::stable::accelerator::DeviceGuard guard((int32_t)device);
  ComposedGraph* made = nullptr;
  check("compose_graphs", compose_graph(graphs.data(), addresses.data(), (int)graphs.size(), &made));
  return reinterpret_cast<int64_t>(made);
}

void replay_graph(int64_t graph, int64_t device) {
  NEAP_CHECK(aoti_torch_get_current_cuda_stream != nullptr, "replay_graph: this torch has no CUDA");
  torch::stable::accelerator::DeviceGuard guard((int32_t)device);
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream((int32_t)device, &stream));
  check("replay_graph", launch_graph(reinterpret_cast<const ComposedGraph*>(graph), stream));
}

void free_graph(int64_t graph) { check("free_graph", destroy_graph(reinterpret_cast<ComposedGraph*>(graph))); }

int64_t cuda_driver_version() {
  int version = 0;
  check("cuda_driver_version", driver_version(&version));
  return version;
}

#else

int64_t cuda_driver_version() { NEAP_CHECK(false, "cuda_driver_version: this library was built without CUDA"); }
int64_t compose_graphs(std::vector<int64_t>, std::vector<int64_t>, int64_t) { NEAP_CHECK(false, "compose_graphs: this library was built without CUDA"); }
void replay_graph(int64_t, int64_t) { NEAP_CHECK(false, "replay_graph: this library was built without CUDA"); }
void free_graph(int64_t) { NEAP_CHECK(false, "free_graph: this library was built without CUDA"); }

#endif

}  // namespace
}  // namespace neap::binding

STABLE_TORCH_LIBRARY_FRAGMENT(neap, m) {
  m.def("compose_graphs(int[] segments, int[] counts, int device) -> int");
  m.def("replay_graph(int graph, int device) -> ()");
  m.def("free_graph(int graph) -> ()");
  m.def("cuda_driver_version() -> int");
}

STABLE_TORCH_LIBRARY_IMPL(neap, CompositeExplicitAutograd, m) {
  using namespace neap::binding;
  m.impl("compose_graphs", TORCH_BOX(&compose_graphs));
  m.impl("replay_graph", TORCH_BOX(&replay_graph));
  m.impl("free_graph", TORCH_BOX(&free_graph));
  m.impl("cuda_driver_version", TORCH_BOX(&cuda_driver_version));
}
