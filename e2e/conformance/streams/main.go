// Command streams opens one stream of the CRI with Kubernetes' own client library, as the tests tell it.
//
//	streams exec|attach URL PROTOCOL [tty] [stdin] [stdout] [stderr] [ROWSxCOLUMNS...]
//	streams forward URL PROTOCOL PORT
//
// PROTOCOL is spdy or websocket, for exec also one name of a subprotocol. Standard streams are passed through; the exit
// code is the program's, 125 for any other failure. forward prints the local address, then serves until stdin ends.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"strings"

	"k8s.io/apimachinery/pkg/util/httpstream"
	restclient "k8s.io/client-go/rest"
	"k8s.io/client-go/tools/portforward"
	"k8s.io/client-go/tools/remotecommand"
	"k8s.io/client-go/transport/spdy"
	"k8s.io/client-go/util/exec"
)

func main() {
	if len(os.Args) < 5 {
		fmt.Fprintln(os.Stderr, "see the source")
		os.Exit(2)
	}
	target, err := url.Parse(os.Args[2])
	if err == nil && os.Args[1] == "forward" {
		err = forward(target, os.Args[3], os.Args[4])
	} else if err == nil {
		err = command(target, os.Args[3], os.Args[4:])
	}
	var code exec.CodeExitError
	if errors.As(err, &code) {
		os.Exit(code.Code)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "streams:", err)
		os.Exit(125)
	}
}

// connection trusts any certificate: a kubelet makes its own.
func connection(target *url.URL) *restclient.Config {
	config := &restclient.Config{Host: target.Scheme + "://" + target.Host}
	config.Insecure = target.Scheme == "https"
	return config
}

type sizes chan remotecommand.TerminalSize

func (s sizes) Next() *remotecommand.TerminalSize {
	size, ok := <-s
	if !ok {
		select {}
	}
	return &size
}

func command(target *url.URL, protocol string, words []string) error {
	config := connection(target)
	var executor remotecommand.Executor
	var err error
	switch {
	case protocol == "spdy":
		executor, err = remotecommand.NewSPDYExecutor(config, "POST", target)
	case protocol == "websocket":
		executor, err = remotecommand.NewWebSocketExecutor(config, "GET", target.String())
	case strings.HasPrefix(protocol, "v5."):
		executor, err = remotecommand.NewWebSocketExecutorForProtocols(config, "GET", target.String(), protocol)
	default:
		var transport http.RoundTripper
		var upgrader spdy.Upgrader
		if transport, upgrader, err = spdy.RoundTripperFor(config); err == nil {
			executor, err = remotecommand.NewSPDYExecutorForProtocols(transport, upgrader, "POST", target, protocol)
		}
	}
	if err != nil {
		return err
	}
	options := remotecommand.StreamOptions{}
	queue := make(sizes, 8)
	for _, word := range words {
		var size remotecommand.TerminalSize
		switch word {
		case "tty":
			options.Tty = true
			options.TerminalSizeQueue = queue
		case "stdin":
			options.Stdin = os.Stdin
		case "stdout":
			options.Stdout = os.Stdout
		case "stderr":
			options.Stderr = os.Stderr
		default:
			if _, err := fmt.Sscanf(word, "%dx%d", &size.Height, &size.Width); err != nil {
				return err
			}
			queue <- size
		}
	}
	close(queue)
	return executor.StreamWithContext(context.Background(), options)
}

func forward(target *url.URL, protocol, port string) error {
	config := connection(target)
	var dialer httpstream.Dialer
	if protocol == "websocket" {
		var err error
		if dialer, err = portforward.NewSPDYOverWebsocketDialer(target, config); err != nil {
			return err
		}
	} else {
		transport, upgrader, err := spdy.RoundTripperFor(config)
		if err != nil {
			return err
		}
		dialer = spdy.NewDialer(upgrader, &http.Client{Transport: transport}, "POST", target)
	}
	stop, ready := make(chan struct{}), make(chan struct{})
	forwarder, err := portforward.NewOnAddresses(dialer, []string{"127.0.0.1"}, []string{"0:" + port}, stop, ready, io.Discard, os.Stderr)
	if err != nil {
		return err
	}
	go func() {
		<-ready
		if ports, err := forwarder.GetPorts(); err == nil {
			fmt.Printf("127.0.0.1:%d\n", ports[0].Local)
		}
		_, _ = io.Copy(io.Discard, os.Stdin)
		close(stop)
	}()
	return forwarder.ForwardPorts()
}
