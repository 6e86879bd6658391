// See conditional.h. A translation unit of its own: cudaGraphSetConditional belongs to CUDA's device runtime, which no other kernel needs.
#include "../include/conditional.h"

#if defined(NEAP_EMULATED)
#include "fake_cudart.h"
#else
#include <cuda_runtime.h>
#endif

#include <new>

#if CUDART_VERSION < 12040
#error "conditional nodes need CUDA 12.4 or later: update the toolkit, or build without CUDA by NEAP_BUILD_CUDA=0"
#endif

namespace neap {

struct ComposedGraph {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
};

namespace {

__global__ void set_condition_kernel(cudaGraphConditionalHandle handle, const int64_t* count) { cudaGraphSetConditional(handle, *count > 0 ? 1u : 0u); }

// The first call that fails ends a function; its name goes with the code.
#define NEAP_CALL(call, ...)                                                                \
  do {                                                                                      \
    if (const cudaError_t code = call(__VA_ARGS__); code != cudaSuccess) return {(int)code, #call}; \
  } while (0)

// Puts into `graph`, behind `after`: the kernel that sets the condition, and the node whose body, `body`, depends on it.
GraphError add_condition(cudaGraph_t graph, cudaGraphNode_t after, const int64_t* count, cudaGraph_t* body) {
  cudaGraphConditionalHandle handle;
  NEAP_CALL(cudaGraphConditionalHandleCreate, &handle, graph, 0, cudaGraphCondAssignDefault);
  void* arguments[] = {&handle, &count};
  cudaKernelNodeParams kernel = {};
  kernel.func = reinterpret_cast<void*>(&set_condition_kernel);
  kernel.gridDim = dim3(1), kernel.blockDim = dim3(1);
  kernel.kernelParams = arguments;
  cudaGraphNode_t set, branch;
  NEAP_CALL(cudaGraphAddKernelNode, &set, graph, &after, 1, &kernel);
  cudaGraphNodeParams condition = {};
  condition.type = cudaGraphNodeTypeConditional;
  condition.conditional.handle = handle;
  condition.conditional.type = cudaGraphCondTypeIf;
  condition.conditional.size = 1;
#if CUDART_VERSION >= 13000
  NEAP_CALL(cudaGraphAddNode, &branch, graph, &set, nullptr, 1, &condition);
#else
  NEAP_CALL(cudaGraphAddNode, &branch, graph, &set, 1, &condition);
#endif
  *body = condition.conditional.phGraph_out[0];
  return {};
}

GraphError build(void* const* segments, const int64_t* const* counts, int num_segments, ComposedGraph& out) {
  NEAP_CALL(cudaGraphCreate, &out.graph, 0);
  cudaGraph_t graph = out.graph;
  // Nested, not in a row: behind a body that did not run, the next count is an old one.
  for (int i = 0; i < num_segments; ++i) {
    cudaGraphNode_t segment;
    NEAP_CALL(cudaGraphAddChildGraphNode, &segment, graph, nullptr, 0, static_cast<cudaGraph_t>(segments[i]));
    if (i + 1 < num_segments)
      if (const GraphError error = add_condition(graph, segment, counts[i], &graph); error.call) return error;
  }
  NEAP_CALL(cudaGraphInstantiate, &out.executable, out.graph, 0);
  return {};
}

}  // namespace

GraphError compose_graph(void* const* segments, const int64_t* const* counts, int num_segments, ComposedGraph** out) {
  auto* made = new ComposedGraph;
  const GraphError error = build(segments, counts, num_segments, *made);
  if (error.call) destroy_graph(made);
  else *out = made;
  return error;
}

GraphError launch_graph(const ComposedGraph* graph, void* stream) {
  NEAP_CALL(cudaGraphLaunch, graph->executable, static_cast<cudaStream_t>(stream));
  return {};
}

GraphError destroy_graph(ComposedGraph* graph) {
  cudaError_t executable = cudaSuccess, whole = cudaSuccess;
  if (graph->executable) executable = cudaGraphExecDestroy(graph->executable);
  if (graph->graph) whole = cudaGraphDestroy(graph->graph);
  delete graph;
  if (executable != cudaSuccess) return {(int)executable, "cudaGraphExecDestroy"};
  if (whole != cudaSuccess) return {(int)whole, "cudaGraphDestroy"};
  return {};
}

GraphError driver_version(int* version) {
  NEAP_CALL(cudaDriverGetVersion, version);
  return {};
}

}  // namespace neap
