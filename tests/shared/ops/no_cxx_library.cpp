// What kernels_alone.cpp needs of C++'s library, for a system whose library would take minutes to compile.
#include <cstdlib>
#include <new>

void* operator new(size_t bytes) { return std::malloc(bytes); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

// The one thread ends with the program.
extern "C" int __cxa_thread_atexit(void (*)(void*), void*, void*) { return 0; }

// libc++'s end of a program that asks for too much.
_LIBCPP_BEGIN_NAMESPACE_STD
void __libcpp_verbose_abort(const char*, ...) noexcept { std::abort(); }
_LIBCPP_END_NAMESPACE_STD
