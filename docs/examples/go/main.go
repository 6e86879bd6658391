// Streams one answer: go run . 127.0.0.1:7071 MODEL PROMPT
//
// `buf generate --template ../../../buf.gen.yaml ../../..` makes the generated code in this folder.
package main

import (
	"context"
	"fmt"
	"io"
	"log"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/status"

	inferencev1 "neap-example/gen/neap/inference/v1"
)

func main() {
	if len(os.Args) != 4 {
		log.Fatal("usage: main TARGET MODEL PROMPT")
	}
	// Releases from 1.63 have grpc.NewClient and insecure.NewCredentials for this; the two used here work in every release 1.x.
	connection, err := grpc.Dial("dns:///"+os.Args[1], grpc.WithInsecure(),
		grpc.WithDefaultServiceConfig(`{"loadBalancingConfig": [{"round_robin": {}}]}`))
	if err != nil {
		log.Fatal(err)
	}
	defer connection.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()

	maxTokens := uint32(32)
	stream, err := inferencev1.NewInferenceServiceClient(connection).Generate(ctx, &inferencev1.GenerateRequest{
		ModelId: os.Args[2],
		Prompt: &inferencev1.GenerateRequest_Chat{Chat: &inferencev1.Chat{
			Messages: []*inferencev1.ChatMessage{{Role: "user", Content: os.Args[3]}},
		}},
		Stopping: &inferencev1.Stopping{MaxTokens: &maxTokens},
	})
	if err != nil {
		log.Fatal(err)
	}
	for {
		event, err := stream.Recv()
		if err == io.EOF {
			break
		}
		if err != nil {
			log.Fatalf("%s: %s", status.Code(err), status.Convert(err).Message())
		}
		fmt.Print(event.GetChunk().GetText() + event.GetFinished().GetText())
	}
	fmt.Println()
}
