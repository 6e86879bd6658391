// The few calls of CUDA's runtime that csrc/cuda/conditional.cu makes, on the host: graphs are built, checked and run for real, but
// for the segments, which only note that they ran. Any call can be made to fail.
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#ifndef CUDART_VERSION
#define CUDART_VERSION 13000
#endif
#define __global__

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 0, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
enum cudaError_t { cudaSuccess = 0, cudaErrorFake = 999 };
enum cudaGraphNodeType { cudaGraphNodeTypeConditional = 13 };
enum cudaGraphConditionalNodeType { cudaGraphCondTypeIf = 0, cudaGraphCondTypeWhile = 1 };
enum { cudaGraphCondAssignDefault = 1 };
using cudaStream_t = void*;
using cudaGraphConditionalHandle = unsigned long long;
struct cudaGraphEdgeData;

struct FakeGraph;
struct FakeNode {
  FakeGraph* graph;
  FakeNode* after;
  std::function<void()> run;
};
struct FakeGraph {
  std::vector<std::unique_ptr<FakeNode>> nodes;
  std::vector<std::unique_ptr<FakeGraph>> bodies;
  std::function<void()> segment;  // of what a test hands in
};
struct FakeExec {
  FakeGraph* graph;
};
using cudaGraph_t = FakeGraph*;
using cudaGraphNode_t = FakeNode*;
using cudaGraphExec_t = FakeExec*;

struct cudaKernelNodeParams {
  void* func;
  dim3 gridDim, blockDim;
  unsigned sharedMemBytes;
  void** kernelParams;
  void** extra;
};
struct cudaConditionalNodeParams {
  cudaGraphConditionalHandle handle;
  cudaGraphConditionalNodeType type;
  unsigned size;
  cudaGraph_t* phGraph_out;
};
struct cudaGraphNodeParams {
  cudaGraphNodeType type;
  cudaConditionalNodeParams conditional;
};

namespace fake {

struct Condition {
  FakeGraph* graph;
  unsigned value, initial;
  bool set = false, used = false;
};
struct State {
  std::vector<Condition> conditions;  // a handle is an index + 1
  std::vector<std::unique_ptr<cudaGraph_t>> outputs;
  int calls = 0, failing = 0, graphs = 0, executables = 0;  // alive
};
inline State& state() { static State s; return s; }

[[noreturn]] inline void die(const char* what) {
  std::fprintf(stderr, "fake CUDA: %s\n", what);
  std::_Exit(86);
}
inline cudaError_t called(const char* name) {
  const bool fails = ++state().calls == state().failing;
  std::printf("call %s%s\n", name, fails ? " fails" : "");
  return fails ? cudaErrorFake : cudaSuccess;
}
inline cudaError_t add(cudaGraphNode_t* node, cudaGraph_t graph, const cudaGraphNode_t* after, size_t count, std::function<void()> run) {
  if (count > 1) die("more than one dependency");
  if (count && (*after)->graph != graph) die("a node behind one of another graph");
  if (count == 0 && !graph->nodes.empty()) die("two nodes that nothing orders");
  graph->nodes.push_back(std::make_unique<FakeNode>(FakeNode{graph, count ? *after : nullptr, std::move(run)}));
  *node = graph->nodes.back().get();
  return cudaSuccess;
}
inline void run(const FakeGraph& graph) {
  for (const auto& node : graph.nodes) node->run();
}

}  // namespace fake

#define FAKE_CALL(name) if (const cudaError_t code = fake::called(name)) return code

inline cudaError_t cudaDriverGetVersion(int* version) { FAKE_CALL("cudaDriverGetVersion"); *version = 12080; return cudaSuccess; }
inline cudaError_t cudaGraphCreate(cudaGraph_t* graph, unsigned) {
  FAKE_CALL("cudaGraphCreate");
  *graph = new FakeGraph, ++fake::state().graphs;
  return cudaSuccess;
}
inline cudaError_t cudaGraphAddChildGraphNode(cudaGraphNode_t* node, cudaGraph_t graph, const cudaGraphNode_t* after, size_t count, cudaGraph_t child) {
  FAKE_CALL("cudaGraphAddChildGraphNode");
  return fake::add(node, graph, after, count, child->segment);  // a copy, as CUDA's
}
inline cudaError_t cudaGraphConditionalHandleCreate(cudaGraphConditionalHandle* handle, cudaGraph_t graph, unsigned value, unsigned flags) {
  FAKE_CALL("cudaGraphConditionalHandleCreate");
  if (flags != cudaGraphCondAssignDefault) fake::die("a condition that keeps what the last launch left");
  fake::state().conditions.push_back({graph, value, value});
  *handle = fake::state().conditions.size();
  return cudaSuccess;
}
inline void cudaGraphSetConditional(cudaGraphConditionalHandle handle, unsigned value) {
  fake::Condition& condition = fake::state().conditions.at(handle - 1);
  condition.value = value, condition.set = true;
}
inline cudaError_t cudaGraphAddKernelNode(cudaGraphNode_t* node, cudaGraph_t graph, const cudaGraphNode_t* after, size_t count, const cudaKernelNodeParams* params) {
  FAKE_CALL("cudaGraphAddKernelNode");
  if (params->gridDim.x * params->gridDim.y * params->gridDim.z * params->blockDim.x * params->blockDim.y * params->blockDim.z != 1)
    fake::die("not exactly one thread sets a condition");
  const auto handle = *static_cast<cudaGraphConditionalHandle*>(params->kernelParams[0]);
  const auto address = *static_cast<const int64_t**>(params->kernelParams[1]);
  const auto kernel = reinterpret_cast<void (*)(cudaGraphConditionalHandle, const int64_t*)>(params->func);
  return fake::add(node, graph, after, count, [=] { kernel(handle, address); });
}
inline cudaError_t fake_add_conditional(cudaGraphNode_t* node, cudaGraph_t graph, const cudaGraphNode_t* after, size_t count, cudaGraphNodeParams* params) {
  FAKE_CALL("cudaGraphAddNode");
  const auto handle = params->conditional.handle;
  fake::Condition& condition = fake::state().conditions.at(handle - 1);
  if (params->type != cudaGraphNodeTypeConditional || params->conditional.type != cudaGraphCondTypeIf || params->conditional.size != 1) fake::die("not an if");
  if (condition.graph != graph) fake::die("a condition of another graph");
  if (condition.used) fake::die("a condition used twice");
  condition.used = true;
  graph->bodies.push_back(std::make_unique<FakeGraph>());
  cudaGraph_t body = graph->bodies.back().get();
  fake::state().outputs.push_back(std::make_unique<cudaGraph_t>(body));  // CUDA keeps the array
  params->conditional.phGraph_out = fake::state().outputs.back().get();
  return fake::add(node, graph, after, count, [=] {
    const fake::Condition& now = fake::state().conditions.at(handle - 1);
    if (!now.set) fake::die("a condition read before it is set");
    if (now.value) fake::run(*body);
  });
}
#if CUDART_VERSION >= 13000
inline cudaError_t cudaGraphAddNode(cudaGraphNode_t* node, cudaGraph_t graph, const cudaGraphNode_t* after, const cudaGraphEdgeData*, size_t count, cudaGraphNodeParams* params) {
  return fake_add_conditional(node, graph, after, count, params);
}
#else
inline cudaError_t cudaGraphAddNode(cudaGraphNode_t* node, cudaGraph_t graph, const cudaGraphNode_t* after, size_t count, cudaGraphNodeParams* params) {
  return fake_add_conditional(node, graph, after, count, params);
}
#endif
inline cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
  FAKE_CALL("cudaGraphInstantiate");
  *executable = new FakeExec{graph}, ++fake::state().executables;
  return cudaSuccess;
}
inline cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  FAKE_CALL("cudaGraphLaunch");
  if (stream != reinterpret_cast<cudaStream_t>(0x57)) fake::die("launched on another stream");
  for (fake::Condition& condition : fake::state().conditions) condition.value = condition.initial, condition.set = false;
  fake::run(*executable->graph);
  return cudaSuccess;
}
inline cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  delete executable, --fake::state().executables;
  FAKE_CALL("cudaGraphExecDestroy");
  return cudaSuccess;
}
inline cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph, --fake::state().graphs;
  FAKE_CALL("cudaGraphDestroy");
  return cudaSuccess;
}
