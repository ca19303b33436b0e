#include <gtest/gtest.h>

#include "tools/report/page.h"

namespace ballast::tools::report_server_test {
namespace {

TEST(LoopbackHost, HasAnyPortSinceATunnelMayLeadHere) {
  for (const char* host : {"localhost", "LocalHost:9000", "127.0.0.1", "127.0.0.1:1", "[::1]",
                           "[::1]:9000", "localhost:65535"}) {
    EXPECT_TRUE(is_loopback_host(host)) << host;
  }
}

TEST(LoopbackHost, IsNoOtherName) {
  for (const char* host :
       {"", "evil.example", "localhost.evil.example", "127.0.0.1.nip.io", "evil.example:8080",
        "localhost:80@evil.example", "localhost:", "localhost:80a", "[::1", "[::1]x", "::1",
        "127.0.0.1:80:80", "localhost/", "0.0.0.0", "null"}) {
    EXPECT_FALSE(is_loopback_host(host)) << host;
  }
}

}  // namespace
}  // namespace ballast::tools::report_server_test
