#include <string>

#include <gtest/gtest.h>

#include "ballast/comm/communicator.h"
#include "ballast/core/error.h"

namespace ballast::comm::device_kind_test {
namespace {

/// The host device under another name.
class Renamed final : public device::Device {
 public:
  explicit Renamed(std::string_view kind) : kind_(kind) {}
  std::string_view kind() const override { return kind_; }
  std::string description() const override { return host_->description(); }
  DeviceBytes allocate(Bytes bytes, std::string_view what) override {
    return host_->allocate(bytes, what);
  }
  Bytes budget() const override { return host_->budget(); }
  Bytes allocated() const override { return host_->allocated(); }
  std::unique_ptr<device::Stream> make_stream(std::string_view name) override {
    return host_->make_stream(name);
  }
  std::unique_ptr<device::Event> make_event() override { return host_->make_event(); }
  std::unique_ptr<device::Pin> pin(HostBytes memory, std::string_view setting) override {
    return host_->pin(memory, setting);
  }
  void copy_to_device(device::Stream& stream, DeviceBytes to, ConstHostBytes from) override {
    host_->copy_to_device(stream, to, from);
  }
  void copy_to_host(device::Stream& stream, HostBytes to, ConstDeviceBytes from) override {
    host_->copy_to_host(stream, to, from);
  }
  bool connect(device::Device& other) override { return host_->connect(other); }
  void copy_to_other(device::Stream& stream, device::Device& other, DeviceBytes to,
                     ConstDeviceBytes from) override {
    host_->copy_to_other(stream, other, to, from);
  }

 private:
  std::string_view kind_;
  std::unique_ptr<device::Device> host_ =
      device::make_device({.kind = "host", .budget = kMiB, .compute_threads = 1});
};

std::string refusal_of(std::string_view kind) {
  Renamed device(kind);
  try {
    join_ranks({}, {})->make_communicator(device);
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), ErrorCategory::comm) << error.what();
    return error.what();
  }
  return "";
}

TEST(MakeCommunicator, NamesADeviceThatNoCommunicatorWorksOn) {
  const std::string text = refusal_of("abacus");
  EXPECT_NE(text.find("device \"abacus\""), std::string::npos) << text;
  EXPECT_NE(text.find("set ballast.device to \"host\""), std::string::npos) << text;
}

TEST(MakeCommunicator, OfTheCudaDeviceNeedsNccl) {
  if (nccl_refusal().empty()) GTEST_SKIP() << "built with NCCL";
  const std::string text = refusal_of("cuda");
  EXPECT_NE(text.find("built without NCCL: reconfigure with -Dnccl=enabled"), std::string::npos)
      << text;
  EXPECT_EQ(text.find('\n'), std::string::npos) << text;
}

}  // namespace
}  // namespace ballast::comm::device_kind_test
