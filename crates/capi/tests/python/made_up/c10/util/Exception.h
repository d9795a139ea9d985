// What the shim uses of PyTorch's header, for a test without PyTorch.
#pragma once
#include <stdexcept>
#include <string>
namespace c10 {
struct Error : std::runtime_error { using std::runtime_error::runtime_error; };
struct OutOfMemoryError : Error { using Error::Error; };
inline std::string joined() { return {}; }
template <class... T> std::string joined(const char *first, T... rest) { return first + joined(rest...); }
}
#define TORCH_CHECK_WITH(kind, condition, ...) do { if (!(condition)) throw c10::kind(c10::joined(__VA_ARGS__)); } while (0)
#define TORCH_CHECK(condition, ...) TORCH_CHECK_WITH(Error, condition, __VA_ARGS__)
