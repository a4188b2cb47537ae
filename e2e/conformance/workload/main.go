// The program in the images that the conformance suite runs: a server, a set-uid program, a pause.
//
//	NAME "master process" PORT WORD   answers 200 on PORT, says WORD at its start, leaves its pid in /var/run/nginx.pid
//	NAME euid                         prints its effective user
//	NAME pause                        waits for a signal
package main

import (
	"fmt"
	"net/http"
	"os"
	"os/signal"
	"strconv"
	"syscall"
)

func main() {
	if len(os.Args) < 2 {
		os.Exit(2)
	}
	switch os.Args[1] {
	case "euid":
		fmt.Printf("Effective uid: %d\n", os.Geteuid())
	case "pause":
		ended := make(chan os.Signal, 1)
		signal.Notify(ended, syscall.SIGTERM, syscall.SIGINT)
		<-ended
	default:
		_ = os.WriteFile("/var/run/nginx.pid", []byte(strconv.Itoa(os.Getpid())+"\n"), 0o644)
		fmt.Printf("%s: started, resuming normal operations\n", os.Args[3])
		page := func(answer http.ResponseWriter, _ *http.Request) { fmt.Fprintln(answer, "It works!") }
		if err := http.ListenAndServe(":"+os.Args[2], http.HandlerFunc(page)); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
}
